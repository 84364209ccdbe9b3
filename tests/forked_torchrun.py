"""torchrun with ranks that are forked from a server which has imported torch, in place of a new Python each."""

import runpy
import sys
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwise.comm.launch.fork_server import fork_server_from_here


def launch(config: LaunchConfig, entrypoint: str) -> elastic_launch:
    """What torchrun calls with the interpreter, and then with its words."""
    del entrypoint
    config.start_method = "forkserver"
    return elastic_launch(config, rank)


def rank(*words: Any) -> None:
    """One rank: `python -u -m MODULE …`."""
    sys.argv = list(words[words.index("-m") + 1 :])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    fork_server_from_here()
    vars(torchrun)["elastic_launch"] = launch
    torchrun.main()
