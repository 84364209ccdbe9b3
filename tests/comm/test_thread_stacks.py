"""Test reading the stack of a thread that runs at the same time."""

import subprocess
import sys
from pathlib import Path

# The worst moment: garbage is collected while the frames of a thread are read, and the collection lets it go on. It
# returns from these frames, and others come to lie where they were. What then goes wrong may end the process.
PROGRAM = """
import gc, threading
from meshwise.comm.api.flight_recorder import stack_of

go, over = threading.Event(), threading.Event()

def waits(depth):
    waits(depth - 1) if depth else go.wait()

def others(depth, *numbers):
    return others(depth - 1, *numbers, depth) if depth else len(numbers)

def runs():
    waits(50)
    others(60)
    over.set()
    others(60)

def lets_it_go_on(phase, _):
    if phase == "start" and threading.get_ident() == here:
        gc.callbacks.clear()
        go.set()
        over.wait()

here = threading.get_ident()
thread = threading.Thread(target=runs, daemon=True)
thread.start()
while " waits\\n" not in stack_of(thread.ident):
    pass
gc.callbacks.append(lets_it_go_on)
gc.set_threshold(1)
told = stack_of(thread.ident)
gc.set_threshold(700)
assert gc.isenabled()
go.set()
thread.join()
print(told)
"""


def test_a_thread_may_go_on_while_its_stack_is_read(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=30, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "outer frames" in ran.stdout
    assert ran.stdout.count(" waits\n") > 1
