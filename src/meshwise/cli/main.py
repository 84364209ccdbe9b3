"""The command `meshwise`: run a subcommand, and turn its exceptions into one message and an exit status.

0     success
1     the run failed (the message names the file with the traceback), or a check found a difference
2     the job, the plan, the loss or the command line is wrong, or this machine cannot start ranks; no traceback
130   Ctrl-C
141   the program that reads stdout has ended, as in `meshwise train --help | head`"""

import contextlib
import difflib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from meshwise.base import __version__
from meshwise.cli import (
    batch_command,
    bench_command,
    checkpoint_command,
    doctor_command,
    draw_command,
    launch_command,
    lesson_command,
    meet_command,
    plan_command,
    simulate_command,
    train_command,
    verify_command,
)
from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.launcher_info import RankLostError, is_rank, prints_for_job
from meshwise.comm.launch.connect import skip_close_at_exit
from meshwise.comm.launch.fork_server import fork_server_from_here
from meshwise.comm.launch.launch import NoSemaphoresError
from meshwise.comm.launch.rank_process import CONSEQUENCE_SECONDS
from meshwise.engine.step_result import NonFiniteError
from meshwise.model.forward import LossError
from meshwise.plan import PlanError
from meshwise.train.console_output import STDOUT, leave_traceback, notes, replace_missing_characters, stdout_failed
from meshwise.train.job_settings import JobError

COMMANDS: Mapping[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "train": ("train a job on local ranks, or under torchrun", train_command.main),
    "verify": ("compare a few steps of the split and the whole model", verify_command.main),
    "simulate": ("predict the time and memory of a plan, without the ranks", simulate_command.main),
    "plan": ("choose the fastest plan for a cluster", plan_command.main),
    "batch": ("find the critical batch of a job by short trials", batch_command.main),
    "checkpoint": ("list, show, check and export checkpoints", checkpoint_command.main),
    "bench": ("measure collectives, and this machine for simulations", bench_command.main),
    "draw": ("draw schedules, cuts, meshes, and a measured step of a run", draw_command.main),
    "launch": ("print the file with which a cluster starts a job", launch_command.main),
    "meet": ("hold the store at which jobs meet that train together", meet_command.main),
    "lesson": ("list the lessons of the course, and run them", lesson_command.main),
    "doctor": ("examine this machine, and whether ranks can communicate", doctor_command.main),
}
"""Summary and main function of each subcommand; it takes the words after the subcommand's name, returns the status."""
_START_RANKS = ("train", "verify", "batch", "bench", "lesson", "doctor")
"""Subcommands that start processes for the ranks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `meshwise` with `arguments`, by default `sys.argv[1:]`, and return the exit status.

    Side effect: stdout writes `?` for characters that its encoding lacks. Without `arguments`, local ranks are forks of
    this process, which saves time because it has imported the modules already."""
    replace_missing_characters()
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments), own=arguments is None)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:  # from writing to stdout: `_guarded` catches all other errors
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # Python flushes stdout again at exit
        if isinstance(error, BrokenPipeError):
            return 141
        return _report(f"meshwise: cannot write the answer: {error.strerror}", status=1)


def _run(words: list[str], *, own: bool) -> int:
    """Run a command line, and return its exit status. `own`: True if the words are `sys.argv[1:]`."""
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    name, *rest = words
    if name == "--version":
        print(f"meshwise {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        return _report(f"meshwise: unknown command {name!r}; {hint}", status=2)
    return _guarded(name, rest, fork=own and name in _START_RANKS and not is_rank())


def _guarded(name: str, words: Sequence[str], *, fork: bool) -> int:
    """Run a subcommand, print its exception, and return the exit status. `fork`: local ranks are forked from here."""
    try:
        if fork:
            with contextlib.suppress(OSError):  # the fork only saves time; the start of the ranks reports the error
                fork_server_from_here()
        try:
            return COMMANDS[name][1](words)
        except BaseException:
            skip_close_at_exit()
            raise
    except NoSemaphoresError as error:
        return _report(f"meshwise {name}: {error.strerror}", status=2)
    except (JobError, PlanError, LossError) as error:
        return _report(f"meshwise {name}: {error}", status=2, once=True)
    except KeyboardInterrupt:
        return _report(f"meshwise {name}: stopped by Ctrl-C", status=130) if prints_for_job() else 130
    except (NonFiniteError, RankLostError, RanksDisagree) as error:
        if isinstance(error, RankLostError) and is_rank():  # the lost rank's own message matters more
            time.sleep(CONSEQUENCE_SECONDS)
        return _report(f"meshwise {name} failed: {error}", status=1)
    except Exception as error:
        if isinstance(error, OSError) and stdout_failed():
            raise
        leave_traceback(error)
        message = "\n  ".join([f"{type(error).__name__}: {error}", *notes(error)])
        return _report(f"meshwise {name} failed: {message}", status=1)


def _report(message: str, *, status: int, once: bool = False) -> int:
    """Print the message to stderr and return `status`.

    `once`: every rank under torchrun has the same message. Rank 0 prints the message and ends; then torchrun ends the
    other ranks. They print the message too if torchrun has not ended them within 5 s."""
    rank = os.environ.get("RANK")
    if once and rank not in (None, "0"):
        time.sleep(5)
    with contextlib.suppress(OSError):  # if stderr is closed, only the status remains
        print(message if rank is None else f"[rank {rank}] {message}", file=sys.stderr, flush=True)
    return status


def _overview() -> str:
    rows = "\n".join(f"  {name:<12}{summary}" for name, (summary, _) in COMMANDS.items())
    return (
        "usage: meshwise COMMAND [JOB.toml] [OPTIONS]\n\n"
        "Train one plain PyTorch model on many devices, and prove that the split model is the same model.\n\n"
        f"{rows}\n\n"
        "  --version  print the version\n"
        "  --help     print this; meshwise COMMAND --help prints the options of a command"
    )


if __name__ == "__main__":
    sys.exit(main())
