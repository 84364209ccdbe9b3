"""Test the server that forks ranks: a fresh process, or a copy of a command that has only imported modules."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise.comm.launch.fork_server import start_context

pytestmark = pytest.mark.processes

ASKING = """
import json, os, sys
from multiprocessing import Pipe, get_context
from meshwise.comm.launch.fork_server import fork_server_from_here, start_context

def look_again(pipe):
    pipe.send("stringprep" in sys.modules)

def look(pipe, held, asker):
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    pipe.send(("stringprep" in sys.modules, held in opened, os.getppid() != asker))

def look_in_a_copy(pipe):
    fresh = get_context("spawn")
    process = fresh.Process(target=look_again, args=(pipe,))
    process.start()
    process.join()

if __name__ == "__main__":
    held = open(sys.argv[1], "w")
    import stringprep
    if sys.argv[2] == "copied":
        fork_server_from_here()
    answers = []
    for target, given in ((look, (held.name, os.getpid())), (look, (held.name, os.getpid())), (look_in_a_copy, ())):
        mine, theirs = Pipe()
        process = start_context().Process(target=target, args=(theirs, *given))
        process.start()
        theirs.close()
        answers.append(mine.recv())
        process.join()
    print(json.dumps(answers), process.exitcode)
"""


@pytest.mark.parametrize("how", ["copied", "afresh"])
def test_a_copied_server_has_what_was_imported_and_nothing_that_is_open_and_copies_no_more(
    how: str, tmp_path: Path
) -> None:
    if start_context().get_start_method() != "forkserver" or not Path("/proc/self/fd").is_dir():
        pytest.skip("ranks are started one by one, or what a process has open is not told")
    script = tmp_path / "asking.py"
    script.write_text(ASKING)
    command = [sys.executable, str(script), str(tmp_path / "held open"), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    answers, _, status = done.stdout.rpartition(" ")
    assert (done.stderr, int(status)) == ("", 0)
    assert json.loads(answers) == [[how == "copied", False, True]] * 2 + [False]
