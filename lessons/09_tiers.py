# %% [markdown]
# # 9. Tiers: state on the CPU and on disk
#
# What a step needs late may rest elsewhere: Adam's moments are used once a step. So they may lie on a disk, and pass
# through small buffers during the update.
#
#     round 0    read | update | write
#     round 1         | read   | update | write            three buffers are busy at once
#     round 2                  | read   | update | write
#
#     seconds of an update  =  max(compute, bytes / bandwidth of the disk)       bytes = 2 · 8 P/n, there and back
#
# Papers: Ren et al., *ZeRO-Offload*, arXiv 2101.06840; Rajbhandari et al., *ZeRO-Infinity*, arXiv 2104.07857.

# %%
import copy
import tempfile
from pathlib import Path

import torch
from torch import nn

import meshwise as mw
from classroom import run_mesh

torch.manual_seed(0)
START = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
batches = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(1)).unbind()

# %% [markdown]
# ## By hand: Adam whose moments live in a file
#
# The file is mapped into memory. Each round copies a chunk of both moments into a buffer, updates, and writes it back.

# %%


def adam_on_disk(numbers, gradient, moments, step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, chunk=4096):
    """One step of Adam; `moments` is a tensor (2, numbers) in a file. Returns the largest buffer in numbers."""
    largest = 0
    for start in range(0, len(numbers), chunk):
        part = slice(start, start + chunk)
        m, v = moments[:, part].clone()  # read
        m.lerp_(gradient[part], 1 - betas[0])
        v.mul_(betas[1]).addcmul_(gradient[part], gradient[part], value=1 - betas[1])
        scale = lr / (1 - betas[0] ** step)
        numbers[part] -= scale * m / ((v / (1 - betas[1] ** step)).sqrt() + eps)
        moments[0, part], moments[1, part] = m, v  # write
        largest = max(largest, 2 * len(m))
    return largest


def by_hand(folder):
    model = copy.deepcopy(START)
    total = sum(p.numel() for p in model.parameters())
    moments = torch.from_file(f"{folder}/moments", shared=True, size=2 * total).view(2, total)
    for step, x in enumerate(batches, start=1):
        model.zero_grad()
        (model(x) - x).square().mean().backward()
        numbers = torch.cat([p.detach().flatten() for p in model.parameters()])
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        largest = adam_on_disk(numbers, gradient, moments, step)
        for p, part in zip(model.parameters(), numbers.split([p.numel() for p in model.parameters()])):
            p.data.copy_(part.view_as(p))
    return numbers, largest, 2 * total


with tempfile.TemporaryDirectory() as folder:
    hand, buffer, moments = by_hand(folder)
    print(f"moments on disk: {4 * moments:,} bytes; in memory at one time: {4 * buffer:,} bytes")
    assert buffer < moments / 3

model = copy.deepcopy(START)
adam = torch.optim.Adam(model.parameters(), lr=1e-3)
for x in batches:
    adam.zero_grad()
    (model(x) - x).square().mean().backward()
    adam.step()
single = torch.cat([p.detach().flatten() for p in model.parameters()])
torch.testing.assert_close(hand, single, rtol=1e-4, atol=1e-6)
print("by hand: the parameters of torch's Adam, to rounding")

# %% [markdown]
# ## With meshwise: a word in the plan
#
# `offload=optimizer:disk` gives the **bits** of the plan without it.

# %%


def with_meshwise(world, offload, folder):
    options = mw.Options(swap=mw.SwapConfig(folder=Path(folder), buffer=2**16))
    trainer = mw.parallelize(
        copy.deepcopy(START),
        f"dp=4 zero=1 offload={offload}",
        loss=lambda out, x: ((out - x).square().sum(), x.numel()),
        optimizer=torch.optim.Adam,
        options=options,
        world=world,
        lr=1e-3,
    )
    for x in batches:
        trainer.step(x)
    return torch.cat([v.detach().flatten() for _, v in trainer.full_parameters()]), trainer.memory()


with tempfile.TemporaryDirectory() as folder:
    plain, before = run_mesh(lambda world: with_meshwise(world, "none", folder))[0]
    disk, after = run_mesh(lambda world: with_meshwise(world, "optimizer:disk", folder))[0]
assert torch.equal(plain, disk), "a tier moves bytes and changes none"
torch.testing.assert_close(plain, single, rtol=1e-4, atol=1e-6)
print("kind              plain      disk")
for kind in sorted(before | after):
    print(f"{kind:15} {before.get(kind, 0):7,}   {after.get(kind, 0):7,}")
assert after["disk/optimizer"] + after["optimizer"] == before["optimizer"], "the moments, without the count of steps"
assert after["optimizer"] < 100

# %% [markdown]
# ## Exercise
#
# Moments of P parameters in fp32 rest on a disk that reads and writes `rate` bytes per second in total, shared by the n
# ranks of a host, each with 1/n of them (ZeRO-1). Write `answer(P, n, rate)`: the least seconds of an update.

# %%


def answer(P, n, rate):
    return 8 * P / n / rate


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    got = answer(1e9, 8, 4e9)
    if got == 0.25:
        return "one rank has 1/n, but all n ranks use the same disk; and moments are read and written"
    if got == 2.0:
        return "moments are read and also written back"
    return "" if got == 4.0 else f"1e9 parameters at 4 GB/s take 4 s, not {got}"


print(check(answer) or "right")
