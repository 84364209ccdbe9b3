"""The command `meshwise lesson`: list the lessons of the course, run a lesson in the terminal, or write its page.

A lesson is a Python file in the percent format: `# %%` begins code, `# %% [markdown]` a cell of text in comments."""

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from markdown_it import MarkdownIt
from rich.markdown import Markdown

from meshwise.cli.shared_flags import check_outputs, drawing_console, write_and_say
from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run
from meshwise.train.flags_and_toml import parse_flags
from meshwise.train.job_settings import JobError
from meshwise.view.picture import html_document

_CELL = re.compile(r"^# %%(.*)\n", re.MULTILINE)
_CONTENT = "main>p,main>ul,main>h2{margin:16px 0}main pre{padding:10px;overflow:auto;border:1px solid var(--edge)}"


@dataclass(frozen=True)
class LessonFlags:
    """List the lessons of the course, or run one on four ranks."""

    number: Annotated[str, tyro.conf.Positional] = ""
    """Number of the lesson, as in 07; `all` runs every lesson and prints a line for each."""
    processes: bool = False
    """Run the ranks as four processes. By default they are threads of this process."""
    html: Path | None = None
    """Write the lesson as an HTML page here: text, code, output and pictures. It loads no other files."""
    folder: Path | None = None
    """Folder of the lessons. Default: `lessons` here, or in the repository of an editable installation."""


@dataclass(frozen=True)
class LessonCell:
    """Cell of a lesson, and its output when it has run: printed text, and pictures as SVG.

    `line`: number of lines before `text` in the file."""

    is_text: bool
    text: str
    line: int
    printed: str = ""
    pictures: tuple[str, ...] = ()

    @property
    def markdown(self) -> str:
        """Cell and output as Markdown."""
        if self.is_text:
            return self.text
        printed = f"```text\n{self.printed.rstrip()}\n```\n" if self.printed.strip() else ""
        figures = "".join(f"\n<figure>{svg}</figure>\n" for svg in self.pictures)
        return f"```python\n{self.text.strip()}\n```\n\n{printed}{figures}"


def main(words: Sequence[str]) -> int:
    """List, run or write lessons; return the exit status 0. Raises JobError, and the error of a lesson that fails."""
    flags = parse_flags(words, prog="meshwise lesson", default=LessonFlags())
    paths = find_lessons(flags.folder)
    check_outputs([flags.html])
    wanted = [path for path in paths if flags.number in ("all", path.name[:2], path.name[:2].lstrip("0"))]
    if not flags.number:
        print("\n".join(f"{path.name[:2]}  {title_of(path)}" for path in paths))
        print("\nmeshwise lesson 07 runs one; add --processes for 4 processes, or --html PATH for a page")
    elif not wanted:
        raise JobError(f"no lesson {flags.number!r}; the lessons are 01 to {paths[-1].name[:2]}, or all")
    elif flags.html and (flags.number == "all" or flags.processes):
        raise JobError("--html needs one lesson number, as in 07, and no --processes")
    elif flags.processes:
        run(4, _rank, args=(wanted,))
    elif flags.number == "all":
        print_all(wanted)
    else:
        _run_one(wanted[0], flags)
    return 0


def _run_one(path: Path, flags: LessonFlags) -> None:
    console, written = drawing_console(), ""
    for cell in run_lesson(path):
        written += f"{cell.markdown}\n"
        if not flags.html:
            console.print(Markdown(cell.text if cell.is_text else f"```python\n{cell.text}\n```"))
            console.show(cell.printed)
    body = f"<style>{_CONTENT}</style>{MarkdownIt('commonmark').enable('table').render(written)}"
    page = html_document(body, title=title_of(path))
    write_and_say(flags.html, write=lambda file: file.write_text(page, encoding="utf-8"))


def _rank(world: World, paths: Sequence[Path]) -> None:
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing if world.rank else sys.stdout):
        print_all(paths)


def print_all(paths: Sequence[Path]) -> None:
    """Run lessons one after the other. Print the title of each; if there is one lesson, its output too."""
    for path in paths:
        printed = [cell.printed for cell in run_lesson(path)]
        print("\n".join([title_of(path), *(text for text in printed if text and len(paths) == 1)]), flush=True)


def find_lessons(given: Path | None) -> list[Path]:
    """Return the files of the lessons in order. Raises JobError if the folder is not found."""
    for folder in [given] if given else [Path("lessons"), Path(__file__).parents[3] / "lessons"]:
        if found := sorted(folder.resolve().glob("[0-9][0-9]_*.py")):
            return found
    raise JobError(
        f"no lessons in {given or Path('lessons').resolve()}: no file is named like 01_*.py; "
        "clone the repository of meshwise, and give --folder REPOSITORY/lessons"
    )


def title_of(path: Path) -> str:
    """Return the title of a lesson: its first heading."""
    return next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# # "))[4:]


def read_cells(path: Path) -> Iterator[LessonCell]:
    """Yield the cells of a file in the percent format."""
    text = path.read_text(encoding="utf-8")
    marks = list(_CELL.finditer(text))
    for mark, stop in zip(marks, [*(following.start() for following in marks[1:]), len(text)], strict=True):
        content, is_text = text[mark.end() : stop], "[markdown]" in mark[1]
        if is_text:
            content = re.sub(r"^# ?", "", content, flags=re.MULTILINE)
        yield LessonCell(is_text, content, text.count("\n", 0, mark.end()))


def run_lesson(path: Path) -> Iterator[LessonCell]:
    """Run the cells of a lesson in order, and yield each with its output. Raises the error of a cell that fails."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    sys.path.insert(0, str(path.parent))
    try:
        with tempfile.TemporaryDirectory(prefix="meshwise-lesson-") as folder:
            os.environ["MESHWISE_LESSON_PICTURES"] = folder
            for cell in read_cells(path):
                if cell.is_text:
                    yield cell
                    continue
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(compile("\n" * cell.line + cell.text, path, "exec"), names)  # noqa: S102 - a lesson is a program
                drawn = sorted(Path(folder).glob("*.svg"))
                pictures = tuple(file.read_text(encoding="utf-8") for file in drawn)
                for file in drawn:
                    file.unlink()
                yield replace(cell, printed=printed.getvalue(), pictures=pictures)
    finally:
        sys.path.remove(str(path.parent))
        os.environ.pop("MESHWISE_LESSON_PICTURES")
