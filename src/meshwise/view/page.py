"""Everything that is drawn of some plans as one HTML page, a file that needs nothing else.

Without scripts it is complete: tables and pictures. Details appear for the element under the mouse or the keyboard
focus, and time can be stretched; `page.js` reads all it needs from the pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from meshwise.view.palette import style
from meshwise.view.pictures import pictures
from meshwise.view.plan_account import PlanAccount
from meshwise.view.plan_comparison import Row, comparison_picture, comparison_table
from meshwise.view.svg import svg

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Nothing is loaded, whatever is in the page."""


def write_page(accounts: Sequence[PlanAccount], *, path: Path, title: str) -> None:
    """Write it. Raises OSError when it cannot be written."""
    path.write_text(page(accounts, title=title), encoding="utf-8")


def page(accounts: Sequence[PlanAccount], *, title: str) -> str:
    """Return the page: what plans have in common and what not, and then each of them, all to one scale of time."""
    name = escape(title)
    head = (
        f'<meta charset="utf-8"><title>{name}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style()}{_part('page.css')}</style>"
    )
    body = "".join((f"<h1>{name}</h1>", *_overview(accounts), *_sections(accounts)))
    script = f"<script>{_part('page.js')}</script>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>{body}</main>{script}</body></html>\n'


def _overview(accounts: Sequence[PlanAccount]) -> Iterator[str]:
    yield f'<section id="overview"><figure>{svg(comparison_picture(accounts))}</figure>'
    yield f'<div class="wide">{_table(comparison_table(accounts))}</div></section>'


def _sections(accounts: Sequence[PlanAccount]) -> Iterator[str]:
    for number, (account, drawn) in enumerate(zip(accounts, pictures(accounts), strict=True), start=1):
        figures = "".join(f"<figure>{svg(picture)}</figure>" for picture in drawn)
        yield f'<section class="plan" id="plan-{number}"><h2>{escape(account.title)}</h2>{figures}</section>'


def _table(rows: Sequence[Row]) -> str:
    """Return a table whose first row holds the column titles and whose first column the row titles."""
    titles = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    lines = (
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows[1:]
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _part(name: str) -> str:
    return resources.files("meshwise.view").joinpath(name).read_text(encoding="utf-8")
