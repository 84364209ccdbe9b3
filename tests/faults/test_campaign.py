"""A short form of the campaign: of every kind of fault a few, and none of them costs a checkpoint or a number."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.campaign import campaign

pytestmark = pytest.mark.processes


@pytest.mark.timeout(600)
def test_no_fault_costs_a_checkpoint_or_a_number(tmp_path: Path) -> None:
    tally = campaign(tmp_path, seed=1, faults=12, plans=["dp=2 zero=3"])

    print(tally.table())
    assert not tally.failures, tally.table()
    assert sum(tally.faults.values()) >= 12
    assert {"killed in a step", "killed in a save", "stopped"} <= set(tally.faults)
