"""Start the ranks of a job and let them communicate: the only package that imports torch.distributed."""

from meshwise.comm.api.flight_recorder import CallRecord, Position, RanksDisagree
from meshwise.comm.api.job_processes import RankLostError
from meshwise.comm.api.world import Group, Work, World
from meshwise.comm.in_process.thread_and_trace_worlds import TraceWorld, run_threads
from meshwise.comm.launch.connect import connect
from meshwise.comm.launch.launch import run, torchrun_line

__all__ = [
    "CallRecord",
    "Group",
    "Position",
    "RankLostError",
    "RanksDisagree",
    "TraceWorld",
    "Work",
    "World",
    "connect",
    "run",
    "run_threads",
    "torchrun_line",
]
