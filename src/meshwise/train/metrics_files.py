"""Write the events of a training run to metrics.jsonl (`JsonLines`) and to TensorBoard files (`TensorBoard`)."""

import json
import math
import os
from pathlib import Path
from typing import Any

from meshwise.train.job import JobError
from meshwise.train.run_events import Event, Step, Validation, event_record


class JsonLines:
    """An event sink that appends each event to a file as one line of JSON, and flushes the line at once.

    An infinite number or NaN is written as the string `inf`, `-inf` or `nan`. If the file exists, an unfinished last
    line is removed first; a killed run may have left it.
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            whole = path.read_bytes().rpartition(b"\n")
            os.truncate(path, len(whole[0] + whole[1]))
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: Event) -> None:
        """Append the event as a line."""
        self._file.write(json.dumps({key: _plain(value) for key, value in event_record(event).items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """An event sink that writes steps and validations as TensorBoard scalars. Raises JobError without the extra."""

    def __init__(self, folder: Path) -> None:
        self._writer = summary_writer()(str(folder))

    def write(self, event: Event) -> None:
        """Write the numbers of a step or a validation; ignore other events."""
        if isinstance(event, Step):
            for name in ("loss", "grad_norm", "lr", "rate", "memory"):
                self._writer.add_scalar(f"train/{name}", getattr(event, name), event.step)
        elif isinstance(event, Validation):
            self._writer.add_scalar("validation/loss", event.loss, event.step)

    def close(self) -> None:
        """Close the TensorBoard files."""
        self._writer.close()


def summary_writer() -> Any:
    """Return torch's class SummaryWriter. Raises JobError when the extra `tensorboard` is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise JobError(
            "train.tensorboard = true needs the extra `tensorboard`: pip install 'meshwise[tensorboard]'"
        ) from error
    return SummaryWriter


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
