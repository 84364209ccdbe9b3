# %% [markdown]
# # 18. Schedules are tables
#
# A schedule says for each rank in which order it computes. `0F2` is the forward of stage 0 for micro-batch 2, `B` the
# backward. A table is data: it can be checked, timed, drawn and run. A clock needs two rules only: a rank does one
# thing after the other, and an action waits for the action of the neighbour stage that it needs.
#
#     schedule     bubble (p stages, f and b = i + w)     kept at most
#     GPipe        (p-1) (f + b)                          m micro-batches
#     1F1B         (p-1) (f + b)                          p
#     ZB-H1        (p-1) (f + i - w)                      p
#
# Papers: Narayanan et al., *PipeDream*, 2019 and *Megatron-LM*, arXiv 2104.04473 (1F1B, interleaved); Qi et al., *Zero
# bubble*, arXiv 2401.10241.

# %%
import copy
import tempfile
from pathlib import Path

import torch
from torch import nn

import meshwise as mw
from classroom import run_mesh, show
from meshwise.pipeline.schedules.named_schedules import make_schedule
from meshwise.pipeline.schedules.schedule_clock import clock
from meshwise.pipeline.schedules.schedule_table import peaks
from meshwise.testing import agree, alone, outcome
from meshwise.view.schedule_text import draw_in_columns
from meshwise.view.shapes import stacked
from meshwise.view.timeline_picture import timeline_picture

P, M = 4, 6

# %% [markdown]
# ## By hand: 1F1B in six lines, a clock in twelve

# %%


def one_forward_one_backward(p, m):
    rows = []
    for rank in range(p):
        ahead = min(p - rank, m)  # forwards before the first backward
        row = [("F", i) for i in range(ahead)]
        for i in range(m):
            row += [("B", i)] + ([("F", ahead + i)] if ahead + i < m else [])
        rows.append(row)
    return rows


SECONDS = {"F": 1.0, "B": 2.0}


def times(rows):
    """Return the end of each action, by (rank, kind, micro-batch)."""
    p, ends, free, at = len(rows), {}, [0.0] * len(rows), [0] * len(rows)
    while any(at[r] < len(rows[r]) for r in range(p)):
        moved = False
        for r in range(p):
            while at[r] < len(rows[r]):
                kind, i = rows[r][at[r]]
                needs = (r - 1, "F", i) if kind == "F" else (r + 1, "B", i)
                if needs[0] in range(p) and needs not in ends:
                    break
                free[r] = max(free[r], ends.get(needs, 0.0)) + SECONDS[kind]
                ends[r, kind, i], at[r], moved = free[r], at[r] + 1, True
        assert moved, "the table deadlocks"
    return ends


rows = one_forward_one_backward(P, M)
ends = times(rows)
print("\n".join(" ".join(f"{rank}{kind}{i}" for kind, i in row) for rank, row in enumerate(rows)))
step = max(ends.values())
print(f"a step takes {step:g}; computing takes {M * 3}, so the bubble is {step - M * 3:g} = (p-1) (f+b)")
assert step - M * 3 == (P - 1) * 3

# %% [markdown]
# ## With meshwise: the same table, and eight others

# %%
table = make_schedule("1f1b", pp=P, microbatches=M)
assert str(table) == "\n".join(" ".join(f"{rank}{kind}{i}" for kind, i in row) for rank, row in enumerate(rows))
assert clock(table).seconds == step
print("schedule       step   kept at most, by rank")
found, drawn = {}, []
for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
    table = make_schedule(name, pp=P, microbatches=2 * P)
    timeline = clock(table)
    found[name] = (timeline.seconds, max(peaks(table)))
    drawn.append(timeline_picture(timeline, title=name, unit="", span=40))
    print(f"{name:12} {timeline.seconds:6g}   {[round(peak) for peak in peaks(table)]}")
print(draw_in_columns(clock(make_schedule("zb-h1", pp=P, microbatches=M)), width=100).plain)
show(stacked(drawn))
assert found["1f1b"][0] == found["gpipe"][0], "1F1B is not faster than GPipe"
assert (found["gpipe"][1], found["1f1b"][1]) == (2 * P, P), "but it keeps p micro-batches, not m"
assert found["zb-h1"][0] < found["1f1b"][0]

# %% [markdown]
# ## A table of your own runs too
#
# Two stages on two ranks. The file is checked before any rank starts, then messages are added.

# %%
torch.manual_seed(0)
START = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()
x = torch.randn(8, 8).double()
MINE = """
0F0 0F1 0F2 0B0 0B1 0F3 0B2 0B3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
"""


def loss(out, _):
    return out.square().sum(), out.numel()


def with_meshwise(world, path):
    options = mw.Options(example=x, cut=mw.CutOptions(at=("2",)))
    plan = f"dp=2 pp=2 microbatches=4 schedule={path}"
    return outcome(
        mw.parallelize(copy.deepcopy(START), plan, loss=loss, world=world, options=options, lr=1e-2), batches=[x]
    )


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "mine.txt"
    path.write_text(MINE)
    figures = run_mesh(lambda world: with_meshwise(world, path))[0]
agree(figures, alone(copy.deepcopy(START), loss=loss, batches=[x], lr=1e-2), bound=1e-9)
print("a table from a file: the numbers of one process")

# %% [markdown]
# ## Exercise
#
# Write `answer(p, m)`: the table of GPipe, as `one_forward_one_backward` returns its own: all forwards, then all
# backwards.

# %%


def answer(p, m):
    return [[("F", i) for i in range(m)] for _ in range(p)]


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    rows = answer(3, 4)
    for rank, row in enumerate(rows):
        for kind in "FB":
            done = [i for k, i in row if k == kind]
            if sorted(done) != list(range(4)):
                return f"rank {rank} does {kind} for micro-batches {done}, not for each of 0 … 3 once"
        if [k for k, _ in row] != ["F"] * 4 + ["B"] * 4:
            return f"rank {rank} begins a backward before its last forward"
    try:
        took = max(times(rows).values())
    except AssertionError as error:
        return str(error)
    return "" if took == 18 else f"the step takes {took:g}; it should be (m + p - 1) (f + b) = 18"


print(check(answer) or "right")
