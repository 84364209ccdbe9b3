"""Write the events of a training run to metrics.jsonl (`JsonLines`)."""

import json
import math
import os
from pathlib import Path
from typing import Any

from meshwise.train.run_events import Event, event_record


class JsonLines:
    """An event sink that appends each event to a file as one line of JSON, and flushes the line at once.

    An infinite number or NaN is written as the string `inf`, `-inf` or `nan`. If the file exists, an unfinished last
    line is removed first; a killed run may have left it."""

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


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
