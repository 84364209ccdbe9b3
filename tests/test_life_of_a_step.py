"""Test that docs/architecture.md lists the files that a step enters."""

import pytest

from life_of_a_step import PAGE, entered, table

pytestmark = pytest.mark.threads("the page lists the files of a step on threads")

MOST = 25
"""As many files as a step may enter."""


def test_the_page_lists_the_files_of_a_step_in_order() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


def test_a_step_enters_few_files() -> None:
    assert len(entered()) <= MOST
