# %% [markdown]
# # 21. Faults and resume
#
# With n devices that each fail once in M hours, a job fails every M/n hours. So it saves checkpoints, and the interval
# T that wastes least balances two costs, C seconds for each save and T/2 of lost work for each failure:
#
#     T  =  √(2 · C · M/n)
#
# A save must survive its own death: write beside, flush, rename. A resume must be the run that never stopped: the state
# of the optimizer, the order of samples and the counters are in the checkpoint.
#
# Papers: Young, *A first order approximation to the optimum checkpoint interval*, CACM 1974; Jiang et al., *MegaScale*,
# arXiv 2402.15627.

# %%
import copy
import hashlib
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import meshwise as mw
from classroom import run_mesh, run_plain

torch.manual_seed(0)
START = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
batches = torch.randn(6, 8, 8, generator=torch.Generator().manual_seed(1)).double().unbind()
folder = Path(run_mesh(lambda world: world.exchange(tempfile.mkdtemp())[0])[0])  # one folder for all ranks

# %% [markdown]
# ## By hand: complete or absent, and checked

# %%


def save(path, state):
    """Write a file that is complete or absent: a name beside it, flushed, then one rename."""
    beside = path.with_suffix(".partial")
    torch.save(state, beside)
    data = beside.read_bytes()
    with beside.open("ab") as file:
        file.write(hashlib.sha256(data).digest())
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def load(path):
    """Return the state of a file, or raise ValueError if a byte of it has changed."""
    data = path.read_bytes()
    data, digest = data[:-32], data[-32:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError(f"{path.name} is damaged; use the checkpoint before it")
    beside = path.with_suffix(".read")
    beside.write_bytes(data)
    return torch.load(beside)


def train(group, steps, *, resume=None, save_as=None):
    rank, n = group.rank(), group.size()
    model = copy.deepcopy(START)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    done = 0
    if resume:
        state = load(resume / f"rank-{rank}")
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        done = state["done"]
    for x in batches[done:steps]:
        adam.zero_grad()
        mine = x.chunk(n)[rank]
        ((model(mine) - mine).square().sum() / x.numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
        adam.step()
    if save_as:
        save_as.mkdir(exist_ok=True)
        save(save_as / f"rank-{rank}", {"model": model.state_dict(), "adam": adam.state_dict(), "done": steps})
    return torch.cat([p.detach().flatten() for p in model.parameters()])


never_stopped = run_plain(lambda group: train(group, 6))[0]
run_plain(lambda group: train(group, 3, save_as=folder / "hand"))
resumed = run_plain(lambda group: train(group, 6, resume=folder / "hand"))[0]
assert torch.equal(resumed, never_stopped)
print("by hand: the resumed run has the bits of the run that never stopped")

# %% [markdown]
# One flipped byte is found:

# %%


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def found(group):
    own = folder / "hand" / f"rank-{group.rank()}"
    flip(own)
    try:
        load(own)
    except ValueError as error:
        return str(error)
    return ""


assert all("damaged" in line for line in run_plain(found))

# %% [markdown]
# ## With meshwise: saved under one plan, resumed under another
#
# The checkpoint has logical tensors, so neither the plan nor the number of ranks matters.

# %%


def trainer_of(world, plan):
    return mw.parallelize(
        copy.deepcopy(START),
        plan,
        loss=lambda out, x: ((out - x).square().sum(), x.numel()),
        optimizer=torch.optim.Adam,
        world=world,
        options=mw.Options(example=batches[0]),
        lr=1e-2,
    )


def first_half(world):
    trainer = trainer_of(world, "dp=4 zero=3")
    for x in batches[:3]:
        trainer.step(x)
    trainer.save(folder / "step-3", extra={"done": 3})


def second_half(world):
    trainer = trainer_of(world, "dp=2 pp=2 microbatches=2")
    restored = trainer.restore(folder)
    for x in batches[restored.extra["done"] :]:
        trainer.step(x)
    return torch.cat([value.detach().cpu().flatten().clone() for _, value in trainer.full_parameters()])


run_mesh(first_half)
ours = run_mesh(second_half)[0]
torch.testing.assert_close(ours, never_stopped, rtol=1e-9, atol=1e-12)
print("dp=4 zero=3, then dp=2 pp=2: the run that never stopped, to 1e-9")


def damaged(world):
    trainer = trainer_of(world, "dp=4")
    if world.rank == 0:
        flip(folder / "step-3" / "rank-00001.safetensors")
    world.barrier()
    try:
        trainer.load(folder / "step-3")
    except mw.DamageError as error:
        return str(error)
    return ""


message = run_mesh(damaged)[0]
print(message.replace(str(folder), "…"))
assert "rank-00001" in message, "the error names the damaged file"

# %% [markdown]
# `meshwise train job.toml --train.save-every 100 --restarts 3` does all of this for a job.
#
# ## Exercise
#
# Write `answer(save, hours, devices)`: the interval in seconds between checkpoints, for `save` seconds a save and
# devices that each fail once in `hours` hours.

# %%


def answer(save, hours, devices):
    return (2 * save * hours) ** 0.5


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    got = answer(60, 20_000, 1_000)
    if abs(got - (2 * 60 * 20_000) ** 0.5) < 1e-6:
        return "a thousand devices fail a thousand times as often; and mind the units"
    if abs(got - (2 * 60 * 20) ** 0.5) < 1e-6:
        return "hours and seconds are mixed"
    wanted = (2 * 60 * 20 * 3600) ** 0.5
    return "" if abs(got - wanted) < 1e-6 else f"{wanted:.0f} s, not {got:.0f}"


print(check(answer) or "right")
