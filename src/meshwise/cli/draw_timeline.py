"""`meshwise draw timeline`: a step of a run as it was, beside what the clock says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshwise.cli.drawing_output import DrawingFiles, check, drawing_board, read_step, save
from meshwise.train.flags import parse_flags
from meshwise.view.plan_account import measured as accounts_of
from meshwise.view.schedule_text import strip


@dataclass(frozen=True)
class DrawTimeline(DrawingFiles):
    """Draw a step of a run that was trained with `--train.timeline`: what each rank did, and where its time went."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/train")
    """The run's folder, or its timeline.json."""


def main(words: Sequence[str]) -> int:
    """Draw what the words name. Raises JobError when there is nothing that was measured."""
    flags = parse_flags(words, prog="meshwise draw timeline", default=DrawTimeline())
    check(flags)
    run = read_step(flags.run)
    board = drawing_board()
    accounts = accounts_of(run)
    longest = max(account.timeline.seconds for account in accounts)
    for account in accounts[:2]:
        board.print(f"{account.title}: {account.timeline.seconds:.4g} s", highlight=False)
        board.show(strip(account.timeline, width=board.width, seconds=longest))
        board.print()
    board.print(str(run), highlight=False, soft_wrap=True)
    save(accounts, files=flags, title=f"a step of {flags.run}")
    return 0
