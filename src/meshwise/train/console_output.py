"""Print to the terminal: text and tables, the events of a training run (`ProgressLines`), and where a rank failed.

`OutputConsole` prints to a terminal, a pipe whose reader may have ended, or a file on a full disk. `leave_traceback`
adds the line of the user's own code to an error, because most lines of a traceback are not the user's."""

import io
import select
import statistics
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from meshwise.base.atomic_file import write_whole
from meshwise.checkpoint.checkpoint_format import DamageError, SaveError
from meshwise.comm.api.flight_recorder import RanksDisagree, raised_at
from meshwise.comm.api.launcher_info import RankLostError
from meshwise.comm.api.world import World
from meshwise.engine.step_result import NonFiniteError
from meshwise.memory.swap_file import TierError
from meshwise.model.forward import LossError
from meshwise.plan import PlanError
from meshwise.precision.dtype_policy import NO_DTYPE
from meshwise.simulate.predicted_memory import ShortageError, size_text
from meshwise.train import run_events
from meshwise.train.job_settings import JobError
from meshwise.train.run_events import RunEvent, Step

STDOUT = 1
"""The file descriptor of standard output."""


class OutputConsole(Console):
    """A rich console that prints tables and text without cutting lines, and that raises BrokenPipeError."""

    def show(self, drawing: Table | Text | str) -> None:
        """Print a table or text as it is, without cutting long lines; the terminal wraps them."""
        self.print(drawing, crop=False, soft_wrap=not isinstance(drawing, Table), markup=False, highlight=False)

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError again; by default rich would end the process with status 1."""
        raise  # noqa: PLE0704 -- the BrokenPipeError that rich is handling


def console_of_width(width: int) -> OutputConsole:
    """Return a console on stdout. If stdout is no terminal, its lines have at most `width` columns."""
    return OutputConsole() if OutputConsole().is_terminal else OutputConsole(width=width)


def text_table(rows: Sequence[tuple[str, ...]], *, wrapped: Collection[str] = (), failed: str = "") -> Table:
    """Return a rich table of text cells; the first row holds the titles of the columns.

    Columns whose title is in `wrapped` are aligned to the left, and their long cells wrap. A row is red if a cell
    ends with the text `failed`; "" makes no row red."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, title in enumerate(rows[0]):
        is_wrapped = title in wrapped
        table.add_column(
            title,
            justify="left" if number == 0 or is_wrapped else "right",
            no_wrap=not is_wrapped,
            min_width=None if is_wrapped else max(cell_len(row[number]) for row in rows),
            overflow="fold",
        )
    for row in rows[1:]:
        style = "red" if failed and any(cell.endswith(failed) for cell in row) else None
        table.add_row(*map(Text, row), style=style)
    return table


def replace_missing_characters() -> None:
    """Make stdout write `?` for a character that its encoding lacks, as under PYTHONIOENCODING=ascii."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def stdout_failed() -> bool:
    """Return whether writing to stdout fails because its reader has ended or its disk is full. Flushes stdout."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def counted(number: int, *, of: str) -> str:
    """Return a number and the noun `of`, with an s for the plural: `1 step`, `1,000 steps`."""
    return f"{number:,} {of}{'s' * (number != 1)}"


_MOST_STEPS = 5
"""Largest number of slow steps that a line names."""
_STYLES: Mapping[type[RunEvent], str] = {
    run_events.NonFinite: "bold red",
    run_events.SaveFailed: "bold red",
    run_events.Slow: "yellow",
    run_events.Validation: "green",
    run_events.Saved: "dim",
}


class ProgressLines:
    """An event sink that prints one or more lines for each event.

    On a terminal, all steps share one progress line below the other lines. Elsewhere, every `every`-th step and the
    first and last step have a line. The rate is the mean of the last 20 steps, because the rate of one step varies."""

    def __init__(self, console: Console, *, every: int) -> None:
        self._console = console
        self._every = every
        self._unit = "token"
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=1, numbers="")

    def write(self, event: RunEvent) -> None:
        """Print the event; on a terminal, redraw the progress line for a step."""
        if isinstance(event, Step):
            event = self._smooth(event)
            if self._console.is_terminal:
                self._progress.start()
                numbers = _numbers(event, of=self._unit)
                self._progress.update(self._task, completed=event.step, total=event.steps, numbers=numbers)
                if event.step == event.steps:
                    self._progress.refresh()
                return
            if event.step % self._every and event.step not in (1, event.steps):
                return
        if isinstance(event, run_events.Sample | run_events.End):
            self._progress.stop()
        text = "\n".join(_lines(event, of=self._unit))
        self._console.print(Text(text, style=_STYLES.get(type(event), "")), soft_wrap=True)

    def close(self) -> None:
        """Stop redrawing the progress line; it stays as it is."""
        self._progress.stop()

    def _smooth(self, step: Step) -> Step:
        """Return the step with the mean rate of the last 20 steps. Sets `_unit`: the loss counts samples or tokens."""
        self._unit = "sample" if step.tokens == step.samples else "token"
        self._recent.append((step.tokens, step.tokens / step.rate if step.rate else 0.0))
        tokens, seconds = map(sum, zip(*self._recent, strict=True))
        return replace(step, rate=tokens / seconds if seconds else 0.0)


def _lines(event: RunEvent, *, of: str) -> Iterator[str]:
    """Yield the event as lines of text; `of`: the unit that the loss counts, `token` or `sample`."""
    match event:
        case run_events.Start():
            steps = f"{counted(event.steps, of='step')} of {counted(event.batch, of='sample')}"
            held = ", ".join(
                f"{kind.replace('_', ' ')} {size_text(size)}" for kind, size in event.memory.items() if size
            )
            trained = "" if event.trained == event.parameters else f", {event.trained:,} of them trained"
            yield f"plan     {event.plan}   (on {event.device})"
            yield from _indented(event.mesh)
            yield from _indented(event.stages)
            yield f"model    {counted(event.parameters, of='parameter')}{trained}; on rank 0: {held}"
            yield f"dtypes   {_dtypes(event.precision)}"
            yield f"data     {event.data}"
            yield f"run      {steps}, into {event.output}"
        case Step():
            yield f"step {event.step}/{event.steps}  {_numbers(event, of=of)}"
        case run_events.Budgeted():
            yield from (f"budget   {line}" for line in event.table.splitlines())
        case run_events.Noise():
            found = "is hidden by noise" if event.critical is None else f"is about {event.critical:.0f} samples"
            yield f"noise    after step {event.step}: the critical batch {found}"
        case run_events.NonFinite():
            yield f"NOT FINITE at step {event.step}: {event.problem}"
        case run_events.Resume(path=""):
            yield "resume   no checkpoint yet: from the start"
        case run_events.Resume():
            samples = counted(event.samples, of="sample")
            yield f"resume   after step {event.step:,} ({samples}), from {event.path}"
            yield from (f"         DAMAGED, skipped: {damage}" for damage in event.damaged)
            yield from (f"         changed: {change}" for change in event.changes)
        case run_events.Slow():
            steps = ", ".join(map(str, event.steps[:_MOST_STEPS])) + " …" * (len(event.steps) > _MOST_STEPS)
            yield (
                f"slow     rank {event.rank} made the other ranks wait in step{'s' * (len(event.steps) > 1)} {steps}: "
                f"busy for {event.seconds:.2f} s, the other ranks for {event.others:.2f} s"
            )
        case run_events.Shares():
            rows, times = " ".join(map(str, event.rows)), " ".join(f"{each:.3f}" for each in event.seconds)
            yield f"shares   from the next step on the replicas get {rows} rows; they were busy for {times} s a step"
        case _:
            yield from _output_lines(event, of=of)


def _output_lines(event: RunEvent, *, of: str) -> Iterator[str]:
    """Yield the lines of events about loads, measurements, checkpoints, validations, and the end of a run."""
    match event:
        case run_events.ExpertLoad():
            if loads := event.mixtures:
                name, mean = max(loads, key=loads.__getitem__), statistics.mean(loads.values())
                head = f"experts  the busiest one got {loads[name]:.2f} times its even share, in {name}"
                yield f"{head}; {mean:.2f} times on average over the mixtures"
            if event.dropped:
                dropped, pairs = map(sum, zip(*event.dropped.values(), strict=True))
                share = f"{dropped / max(1, pairs):.1%}"
                yield f"dropped  {dropped:,} of {pairs:,} choices of experts ({share}), by their capacity"
        case run_events.Measured():
            yield f"time     of a step, the median of {event.steps}; drawn by meshwise draw timeline {event.path}"
            yield from _indented(event.table)
        case run_events.Saved():
            times = f"{event.seconds:.1f} s, {event.held:.2f} s of it blocking"
            yield f"saved    step {event.step} in {event.path} ({times})"
        case run_events.SaveFailed():
            yield f"NOT SAVED at step {event.step}: {event.problem}"
        case run_events.Stopped():
            yield f"stopped  after step {event.step}, as {event.by} asked\nnext: {event.following}"
        case run_events.Validation():
            yield f"validation after step {event.step}: loss {event.loss:.4f} over {counted(event.tokens, of=of)}"
        case run_events.Sample():
            yield "the model writes:"
            text = event.prompt + event.text  # an untrained model may generate control characters
            lines = "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in text).split("\n")
            yield from (f"  | {line}".rstrip() for line in lines)
        case run_events.End():
            yield f"done: {counted(event.steps, of='step')} in {_time(event.seconds)}, loss {event.loss:.4f}"
            yield from (f"  {name:<12} {path}" for name, path in event.outputs.items())
            yield f"next: {event.following}"
        case _:
            raise TypeError(f"{type(event).__name__} has no text")


def _numbers(step: Step, *, of: str) -> str:
    unit = "tok" if of == "token" else f"{of}s"
    return (
        f"loss {step.loss:.4f}  grad {step.grad_norm:.3f}  lr {step.lr:.2e}  {_short(step.rate)} {unit}/s  "
        f"{size_text(step.memory)}  ETA {_time(step.eta)}" + ("  SKIPPED" if step.skipped else "")
    )


def _indented(picture: str) -> list[str]:
    return [f"         {line}" for line in picture.splitlines()]


def _dtypes(precision: Mapping[str, str]) -> str:
    """Return the dtypes as text, each with its kinds of tensors. Kinds that the rank lacks are left out."""
    kinds: dict[str, list[str]] = {}
    for kind, dtype in precision.items():
        if dtype != NO_DTYPE:
            kinds.setdefault(dtype, []).append(kind.replace("_", " "))
    return "; ".join(f"{dtype}: {', '.join(names)}" for dtype, names in kinds.items())


def _short(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


SELF_EXPLAINING = (
    *(DamageError, JobError, LossError, NonFiniteError, PlanError),
    *(RankLostError, RanksDisagree, SaveError, ShortageError, TierError),
)
"""Errors whose message says all that the user needs; no traceback is written for them."""

_PLACE = "the whole traceback "


def leave_traceback(error: Exception, *, world: World | None = None, folder: Path | None = None) -> None:
    """Write the traceback of `error` into a file in `folder` (by default a new temporary folder), and add a note to it.

    Do nothing for an error that has such a note or is in `SELF_EXPLAINING`. If writing fails, the note says why."""
    if isinstance(error, SELF_EXPLAINING) or any(_PLACE in note for note in notes(error)):
        return
    where = "" if world is None or world.size == 1 else f" on rank {world.rank} of {world.size}"
    name = "failure.txt" if world is None else f"failure-rank-{world.rank}.txt"
    try:
        file = Path(tempfile.mkdtemp(prefix="meshwise-") if folder is None else folder) / name
        text = "".join(traceback.format_exception(error))
        write_whole(file, write=lambda place: place.write_text(text, encoding="utf-8"))
        place = f"is in {file}"
    except OSError as refused:
        place = f"could not be written: {refused.strerror}"
    error.add_note(f"raised{where} at {raised_at(error)}; {_PLACE}{place}")


def notes(error: Exception) -> list[str]:
    """Return the notes of an error that are one line long, so without the tracebacks that the launcher adds."""
    return [note for note in getattr(error, "__notes__", []) if "\n" not in note]
