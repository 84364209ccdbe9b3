"""The command `meshwise`: which command it is, and what status it ends with.

0     all is well
1     the run failed; one message, which names the file with the traceback of the rank that did
2     the job, the plan, the loss or the command line cannot work, or this machine cannot start ranks; one message, no
      traceback
130   Ctrl-C
141   nobody reads what it prints any more: `meshwise train --help | head`
"""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from meshwise.cli import bench_command as bench
from meshwise.cli import checkpoint_command as checkpoint
from meshwise.cli import doctor_command as doctor
from meshwise.cli import draw_command as draw
from meshwise.cli import plan_command as plan
from meshwise.cli import simulate_command as simulate
from meshwise.cli import train_command as train
from meshwise.cli import verify_command as verify
from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.launch_environment import is_rank, prints_for_job
from meshwise.comm.api.rank_lost import RankLostError
from meshwise.comm.launch.fork_server import copied, open_streams, tidying
from meshwise.comm.launch.job_semaphores import NoSemaphoresError
from meshwise.comm.launch.joining import leave_undone
from meshwise.comm.launch.rank_process import CONSEQUENCE_SECONDS
from meshwise.engine.step_faults import NonFiniteError
from meshwise.model.forward import LossError
from meshwise.plan import PlanError
from meshwise.train.failure_report import leave_traceback, notes
from meshwise.train.job import JobError
from meshwise.train.output_stream import STDOUT, is_unread, takes_no_more, tolerate

_RANK_0_SECONDS = 5
_STDERR = 2


@dataclass(frozen=True)
class Command:
    """A command: one line for the overview, the function that gets the words after its name, and whether that starts
    ranks as processes.
    """

    summary: str
    main: Callable[[Sequence[str]], int]
    starts_ranks: bool = False


COMMANDS: Mapping[str, Command] = {
    "train": Command("train a job on local ranks, or under torchrun", train.main, starts_ranks=True),
    "verify": Command("prove that a plan is the same model, on a few steps of a job", verify.main, starts_ranks=True),
    "simulate": Command("foretell what a plan takes, on ranks that need not be there", simulate.main),
    "plan": Command("choose the quickest plan for a cluster that need not be there", plan.main),
    "checkpoint": Command("list, show, check, compare and export checkpoints", checkpoint.main),
    "bench": Command(
        "measure the collectives of this machine, and all that a simulation needs of it", bench.main, starts_ranks=True
    ),
    "draw": Command("draw schedules, cuts, meshes, and a step of a run as it was", draw.main),
    "doctor": Command("examine this machine, and whether ranks can talk", doctor.main, starts_ranks=True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `meshwise` with these words and return the exit status.

    Without any, they are the process's own. It is the command then, and may have done nothing but import: the ranks
    that it starts are copies of it.
    """
    with _streams():
        try:
            try:
                return _answer(list(sys.argv[1:] if arguments is None else arguments), own=arguments is None)
            finally:
                sys.stdout.flush()
                if arguments is None and not is_rank():
                    # The status is known: another Ctrl-C is not to change it, nor what the end has to remove.
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
        except OSError as error:  # of stdout: all others have been answered
            unread = is_unread()
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # for what Python still writes when it ends
            return 141 if unread else _say(f"meshwise: cannot write the answer: {error.strerror}", status=1)


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """Replace a closed stdout or stderr by a sink, and escape characters that stdout cannot encode, within the
    block.
    """
    open_streams()
    with contextlib.ExitStack() as stack:
        # Not the null device anew: ranks write where these numbers lead.
        if sys.stdout is None:
            stack.enter_context(contextlib.redirect_stdout(os.fdopen(STDOUT, "w", closefd=False)))
        if sys.stderr is None:
            stack.enter_context(contextlib.redirect_stderr(os.fdopen(_STDERR, "w", closefd=False)))
        tolerate()
        yield


def _answer(words: list[str], *, own: bool) -> int:
    """Return the status of the command that the words are. `own`: of this process, which has done nothing but
    import.
    """
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    name, *rest = words
    if name == "--version":
        print(f"meshwise {version('meshwise')}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        return _say(f"meshwise: unknown command {name!r}; {hint}", status=2)
    return _guarded(name, rest, copy=own and COMMANDS[name].starts_ranks and not is_rank())


def _guarded(name: str, words: Sequence[str], *, copy: bool) -> int:
    """Return the command's status, whatever it raises. `copy`: its ranks are to be copies of this process."""
    try:
        if not copy:
            return _carried_out(name, words)
        with tidying():
            with contextlib.suppress(OSError):  # it only saves time; who needs ranks will meet it again
                copied()
            return _carried_out(name, words)
    except NoSemaphoresError as error:
        return _say(f"meshwise {name}: {error.strerror}", status=2)
    except (JobError, PlanError, LossError) as error:
        return _say(f"meshwise {name}: {error}", status=2, once=True)
    except KeyboardInterrupt:
        return _say(f"meshwise {name}: stopped by Ctrl-C", status=130) if prints_for_job() else 130
    except RankLostError as error:
        if is_rank():  # the lost one has more to say; torchrun ends this one meanwhile
            time.sleep(CONSEQUENCE_SECONDS)
        return _say(f"meshwise {name} failed: {error}", status=1)
    except (NonFiniteError, RanksDisagree) as error:
        return _say(f"meshwise {name} failed: {error}", status=1)
    except Exception as error:
        if isinstance(error, OSError) and takes_no_more():
            raise
        leave_traceback(error)
        told = "\n  ".join([f"{type(error).__name__}: {error}", *notes(error)])
        return _say(f"meshwise {name} failed: {told}", status=1)


def _carried_out(name: str, words: Sequence[str]) -> int:
    try:
        return COMMANDS[name].main(words)
    except BaseException:
        leave_undone()
        raise


def _say(message: str, *, status: int, once: bool = False) -> int:
    """Print to stderr and return the status.

    `once`: every rank under torchrun has the same to say. Rank 0 says it and ends, whereupon torchrun ends the others;
    if it does not, they say it after all.
    """
    rank = os.environ.get("RANK")
    if once and rank not in (None, "0"):
        time.sleep(_RANK_0_SECONDS)
    with contextlib.suppress(OSError):  # where nobody hears it, the status tells
        print(message if rank is None else f"[rank {rank}] {message}", file=sys.stderr, flush=True)
    return status


def _overview() -> str:
    rows = [f"  {name:<12}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: meshwise COMMAND [JOB.toml] [OPTIONS]",
            "",
            "Train one plain PyTorch model on many devices, and prove that the split model is the same model.",
            "",
            *rows,
            "",
            "  --version  print the version",
            "  --help     print this; meshwise COMMAND --help tells the options of a command",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
