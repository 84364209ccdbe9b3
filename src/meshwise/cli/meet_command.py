"""The command `meshwise meet`: run the store through which separate jobs find each other (docs/local_steps.md)."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.comm.network.job_store import is_loopback, loopback_store, store_of
from meshwise.train.flags_and_toml import parse_flags
from meshwise.train.job_settings import JobError


@dataclass(frozen=True)
class MeetFlags:
    """Hold the store at which jobs with `--train.sync join=HOST:PORT` meet, until Ctrl-C."""

    port: int = 29400
    """Port on which the store listens."""
    host: str = "0.0.0.0"  # noqa: S104 - jobs come from other machines
    """Address on which the store listens: 127.0.0.1 for jobs of this machine alone, else every interface."""


def main(words: Sequence[str]) -> int:
    """Open the store and wait. Raises JobError for a port that cannot be opened."""
    flags = parse_flags(words, prog="meshwise meet", default=MeetFlags())
    try:
        local = is_loopback(flags.host)
        store = loopback_store(flags.port) if local else store_of(flags.host, port=flags.port, opens=True)
    except (OSError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise JobError(f"port {flags.port} cannot be opened: {why}. Take another: --port {flags.port + 1}") from error
    print(
        f"jobs meet here, at port {store.port}: meshwise train JOB.toml --train.sync join=HOST:{store.port}", flush=True
    )
    threading.Event().wait()
    return 0
