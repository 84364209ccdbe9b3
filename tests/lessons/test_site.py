"""Test that the site's source has every page and no dead link, and, where the tools are installed, the site itself."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import site_source
from meshwise.cli.lesson_command import find_lessons

ROOT = Path(__file__).parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.threads("has no ranks")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, with lessons that were not run."""
    folder = tmp_path_factory.mktemp("site") / "site-source"
    site_source.write(folder, outputs=False)
    return folder


@pytest.fixture(scope="module")
def site(source: Path) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install 'meshwise[site]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", "mkdocs.yml"]
    done = subprocess.run(command, cwd=source.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return source.parent / "site"


def test_every_page_and_lesson_is_in_the_table_of_contents(source: Path) -> None:
    contents = (source.parent / "mkdocs.yml").read_text()
    pages = {path.name for path in source.glob("*.md")}
    assert pages == set(re.findall(r": ([\w-]+\.md)$", contents, re.MULTILINE))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= pages
    assert len([page for page in pages if page.startswith("lesson-")]) == len(find_lessons(ROOT / "lessons"))


def test_every_link_leads_to_a_file(source: Path) -> None:
    for page in source.glob("*.md"):
        for target, _ in site_source.LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            assert (source / target).exists(), f"{page.name}: {target}"


def test_a_dead_link_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"README.md: the link docs/nowhere.md leads nowhere"):
        site_source.relinked("see [this](docs/nowhere.md)", place=ROOT / "README.md", into=tmp_path)


def test_the_site_is_built_and_its_links_are_checked(site: Path) -> None:
    page = (site / "lesson-04.html").read_text()
    assert "Data parallel training by hand" in page
    assert (site / "index.html").exists()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_it(site: Path, tmp_path: Path) -> None:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    command = [str(BROWSER), *flags, f"--user-data-dir={tmp_path}", (site / "lesson-04.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "Data parallel training by hand" in shown
    assert "By hand" in shown or "Four ranks" in shown
