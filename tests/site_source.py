"""Write the source of the site: the lessons with their output, the pages of docs/, and the table of contents.

    python -m site_source build/site-source        beside it, mkdocs.yml gets its `nav` in build/mkdocs.yml

Lessons are run, so that a page never shows an output that somebody typed. Links
that leave docs/ (into examples/ or benchmarks/) become links to copies of these files."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwise.cli.lesson_command import find_lessons, read_cells, run_lesson, title_of

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")

GUIDES: Mapping[str, Sequence[tuple[str, str]]] = {
    "Guides": (
        ("Come from DDP, FSDP, DeepSpeed, Megatron", "coming_from.md"),
        ("Move a training script", "moving.md"),
        ("Fine-tune a model of Hugging Face", "fine_tuning.md"),
        ("Bring your data", "data.md"),
        ("Fit a bigger model", "memory.md"),
        ("Make it faster: choose a plan", "planner.md"),
        ("Long sequences", "context.md"),
        ("Mixtures of experts", "experts.md"),
        ("Large batches", "large_batch.md"),
        ("Half precision", "precision.md"),
        ("Split your own model", "tensor.md"),
        ("Test split models", "testing.md"),
        ("Pipelines", "pipeline.md"),
        ("Start on a cluster", "clusters.md"),
        ("Recover from faults", "faults.md"),
        ("Checkpoints", "checkpoints.md"),
        ("Pictures", "view.md"),
        ("Predict memory and time", "simulation.md"),
    ),
    "Reference": (("Plans", "plans.md"), ("API", "api.md"), ("Glossary", "glossary.md")),
    "How it works": (("Architecture", "architecture.md"), ("Benchmarks", "benchmarks.md")),
}


def relinked(text: str, *, place: Path, into: Path) -> str:
    """Return a page with links that work on the site. `place`: the page's own path in the repository.

    Pages of docs/ and lessons stay pages. Another file of the repository is copied into `files`. A link to a folder
    becomes a link to the first page. Raises ValueError for a link to nothing."""

    def link(found: re.Match[str]) -> str:
        target, anchor = (place.parent / found[1]).resolve(), found[2] or ""
        if not target.exists():
            raise ValueError(f"{place.relative_to(ROOT)}: the link {found[1]} leads nowhere")
        name = target.relative_to(ROOT)
        if name.parts[0] == "docs":
            return f"]({'/'.join(name.parts[1:])}{anchor})"
        if name.parts[0] == "lessons" and re.match(r"\d\d_", name.name):
            return f"](lesson-{name.name[:2]}.md)"
        if target.is_dir():
            return "](index.md)"
        copy = into / "files" / name.parent / f"{name.name}.txt"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(target, copy)
        return f"](files/{name}.txt)"

    return LINK.sub(link, text)


def table_of_contents(lessons: Sequence[Path]) -> list[str]:
    """Return the lines of the `nav` of mkdocs; pages of docs/ without a place in `GUIDES` come last."""
    course = [(title_of(path), f"lesson-{path.name[:2]}.md") for path in lessons]
    lines = ["nav:", "  - Start: index.md", "  - Lessons:", "      - The course: lessons.md"]
    lines += [f"      - {json.dumps(title)}: {page}" for title, page in course]
    listed = {"lessons.md", *(page for pages in GUIDES.values() for _, page in pages)}
    others = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in listed]
    more = {"More": [(page.read_text().splitlines()[0].removeprefix("# "), page.name) for page in others]}
    for section, pages in {**GUIDES, **(more if others else {})}.items():
        lines += [f"  - {section}:", *(f"      - {json.dumps(title)}: {page}" for title, page in pages)]
    return lines


def write(into: Path, *, outputs: bool = True) -> None:
    """Write the pages into the empty folder `into`. outputs: run the lessons; without, pages have their text alone."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(ROOT / "docs", into)
    lessons = find_lessons(ROOT / "lessons")
    for page in sorted((ROOT / "docs").glob("*.md")):
        (into / page.name).write_text(relinked(page.read_text(), place=page, into=into))
    readme = ROOT / "README.md"
    (into / "index.md").write_text(relinked(readme.read_text(), place=readme, into=into))
    for path in lessons:
        print(f"lesson {path.name[:2]}", flush=True)
        cells = run_lesson(path) if outputs else read_cells(path)
        text = "\n".join(cell.markdown for cell in cells)
        (into / f"lesson-{path.name[:2]}.md").write_text(text)
    plain = (ROOT / "mkdocs.yml").read_text().replace("build/", f"{into.parent}/")
    (into.parent / "mkdocs.yml").write_text("\n".join([plain, *table_of_contents(lessons), ""]))


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve())
