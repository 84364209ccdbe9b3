"""The server that ranks are forked from: afresh, or a copy of a command that has done nothing but import."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise.comm.launch.fork_server import starting

pytestmark = pytest.mark.processes

ASKING = """
import json, os, sys
from multiprocessing import Pipe, get_context
from meshwise.comm.launch.fork_server import copied, starting

def look_again(pipe):
    pipe.send("stringprep" in sys.modules)

def look(pipe, held, asker):
    fresh = get_context("spawn")
    mine, theirs = fresh.Pipe()
    process = fresh.Process(target=look_again, args=(theirs,))
    process.start()
    theirs.close()
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    pipe.send(("stringprep" in sys.modules, held in opened, os.getppid() != asker, mine.recv()))
    process.join()

if __name__ == "__main__":
    held = open(sys.argv[1], "w")
    import stringprep
    if sys.argv[2] == "copied":
        copied()
    answers = []
    for _ in range(2):
        mine, theirs = Pipe()
        process = starting().Process(target=look, args=(theirs, held.name, os.getpid()))
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
    if starting().get_start_method() != "forkserver" or not Path("/proc/self/fd").is_dir():
        pytest.skip("ranks are started one by one, or what a process has open is not told")
    script = tmp_path / "asking.py"
    script.write_text(ASKING)
    command = [sys.executable, str(script), str(tmp_path / "held open"), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    answers, _, status = done.stdout.rpartition(" ")
    assert (done.stderr, int(status)) == ("", 0)
    assert json.loads(answers) == [[how == "copied", False, True, False]] * 2


TOLD_LATE = """
import os, signal, sys, time
from meshwise.comm.launch.fork_server import copied, starting

class Late:
    def __reduce__(self):
        return arrive, (os.getpid(), sys.argv[1])

def end(launcher, seconds):
    time.sleep(seconds)
    os.kill(launcher, signal.SIGKILL)

def arrive(launcher, how):
    if how == "ended":
        end(launcher, 0)
        time.sleep(0.2)
    if how == "ends" and not os.fork():
        end(launcher, 1)
        os._exit(0)
    open("what went with the launcher")

if __name__ == "__main__":
    copied()
    process = starting().Process(target=print, args=(Late(),))
    process.start()
    process.join()
    print(process.exitcode)
"""


def test_a_rank_that_cannot_start_says_why_unless_its_launcher_has_ended(tmp_path: Path) -> None:
    if starting().get_start_method() != "forkserver":
        pytest.skip("ranks are started one by one")
    script = tmp_path / "telling.py"
    script.write_text(TOLD_LATE)

    def told(launcher: str) -> tuple[int, str, str]:
        command = [sys.executable, str(script), launcher]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        return done.returncode, done.stdout, done.stderr

    status, code, errors = told("lives")
    assert (status, code) == (0, "1\n")
    assert errors.endswith("No such file or directory: 'what went with the launcher'\n")
    assert told("ended") == told("ends") == (-signal.SIGKILL, "", "")


EARLY = """
import os, signal, sys
from meshwise.comm.launch import fork_server as forked
from meshwise.comm.launch.job_folder import job_folder

ordinary = forked.temporary

def ended():
    if sys.argv[1] != "later":
        os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[1] == "full":
        raise OSError("no space left")
    return ordinary()

forked.temporary = ended
with forked.tidying(), job_folder():
    os.kill(os.getpid(), signal.SIGTERM)
    print("goes on")
"""


@pytest.mark.parametrize("when", ["full", "early", "later"])
def test_a_command_that_is_ended_removes_its_folders_whenever_it_is(when: str, tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", EARLY, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")
    assert list(tmp_path.glob("meshwise-*")) == []
