"""What joins the ranks: the only package that imports torch.distributed."""

from meshwise.comm.group import Group
from meshwise.comm.joining import connect
from meshwise.comm.journal import Position, RanksDisagree, Stamp
from meshwise.comm.launch import run, torchrun_line
from meshwise.comm.lost import RankLostError
from meshwise.comm.thread_world import run_threads
from meshwise.comm.trace_world import TraceWorld
from meshwise.comm.world import Work, World

__all__ = [
    "Group",
    "Position",
    "RankLostError",
    "RanksDisagree",
    "Stamp",
    "TraceWorld",
    "Work",
    "World",
    "connect",
    "run",
    "run_threads",
    "torchrun_line",
]
