# %% [markdown]
# # 5. Buckets and overlap
#
# Two improvements make data parallel training fast. Small gradients are put together in *buckets*, because each call
# has a latency. And a bucket is sent while the backward still computes the gradients of earlier layers.
#
#     backward       layer 4 │ layer 3 │ layer 2 │ layer 1 │
#     all-reduce             │ layer 4 │ layer 3 │ layer 2 │ layer 1 │        only the last one is waited for
#
#     time of k calls of S/k bytes  =  k · latency + S / bandwidth
#
# Paper: Li et al., *PyTorch Distributed*, VLDB 2020, section 3.2.

# %%
import copy

import torch
import torch.distributed as dist
from torch import nn

import meshwise as mw
from classroom import run_mesh, run_plain
from meshwise.testing import count

LAYERS, WIDTH, BUCKET = 8, 16, 2 * 16 * 17  # a bucket takes two layers


torch.manual_seed(0)
START = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).double()


def build():
    return copy.deepcopy(START)


x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).double()

# %% [markdown]
# ## By hand: a hook for each parameter
#
# The backward calls a hook when a gradient is complete. The last gradients come first, so buckets are filled from the
# end of the model. A full bucket is reduced at once with `async_op=True`; only the end of the backward waits.

# %%


class Buckets:
    def __init__(self, model, group):
        self.group, self.log, self.works = group, [], []
        self.waiting = []  # gradients of the current bucket
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self.arrived(name, p))

    def arrived(self, name, parameter):
        self.log.append(f"gradient {name}")
        self.waiting.append(parameter)
        if sum(p.numel() for p in self.waiting) >= BUCKET:
            self.send()

    def send(self):
        flat = torch.cat([p.grad.flatten() for p in self.waiting])
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.works.append((work, flat, self.waiting))
        self.log.append(f"all-reduce of {len(self.waiting)} gradients begins")
        self.waiting = []

    def finish(self, rows):
        if self.waiting:
            self.send()
        for work, flat, parameters in self.works:
            work.wait()
            for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
                p.grad.copy_(part.view_as(p) / rows)
        self.log.append("all arrived")


def by_hand(group):
    model = build()
    buckets = Buckets(model, group)
    mine = x.chunk(group.size())[group.rank()]
    model(mine).square().sum().backward()
    buckets.finish(x.numel())
    return buckets.log, [p.grad for p in model.parameters()]


log, hand = run_plain(by_hand)[0]
print("\n".join(log[:7] + ["…"] + log[-2:]))
sends = [at for at, line in enumerate(log) if line.startswith("all-reduce")]
assert len(sends) == LAYERS // 2
assert log[sends[0] + 1].startswith("gradient"), "the backward continues while the first bucket is on its way"

# %% [markdown]
# ## With meshwise
#
# A bucket is a unit of the model, such as a block: here one all-reduce for each layer, and one of a few numbers at the
# end of the step (loss, count, norm, and a check that all ranks called the same collectives).

# %%


def with_meshwise(world):
    trainer = mw.parallelize(
        build(), "dp=4", loss=lambda out, _: (out.square().sum(), out.numel()), world=world, lr=0.0
    )
    with world.record() as records:
        trainer.step((x,))
    return count(records), [gradient.clone() for _, gradient in trainer.full_gradients()]


counts, ours = run_mesh(with_meshwise)[0]
print(counts)
assert counts["all_reduce[dp]"][0] == LAYERS + 1
model = build()
model(x).square().mean().backward()
for parameter, two, three in zip(model.parameters(), hand, ours, strict=True):
    torch.testing.assert_close(two, parameter.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(three, parameter.grad, rtol=1e-9, atol=1e-12)
print("the gradients are those of one process")

# %% [markdown]
# ## Exercise
#
# The gradients of the layers, last layer first, are complete at times `ready`. One link sends them in this order; each
# takes `send` seconds and waits for the one before. Write `answer(ready, send)`: the time at which the last arrives.

# %%


def answer(ready, send):
    return ready[-1] + send * len(ready)


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    got = answer([1.0, 2.0, 3.0], 0.5)
    if got == 4.5:
        return "nothing overlaps here: all messages leave after the last gradient"
    if got != 3.5:
        return f"ready at 1, 2, 3 and 0.5 each: the last arrives at 3.5, not {got}"
    if (got := answer([1.0, 2.0, 3.0], 2.0)) != 7.0:
        return f"with 2 s each the link is busy from 1 to 7; you have {got}"
    return ""


print(check(answer) or "right")
