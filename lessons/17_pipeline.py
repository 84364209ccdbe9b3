# %% [markdown]
# # 17. A pipeline, forward and backward by hand, with overlap
#
# Each rank has some layers: a *stage*. The batch is cut into micro-batches that follow each other through the stages.
# The backward of a stage is two products: `I`, the gradient of its input, for which the stage before waits, and `W`,
# the gradient of its weights, for which nobody waits. So send the result of I first, and compute W while it travels:
#
#     rank 0 │F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 …
#     rank 1 │.  F0 F1 F2 F3 .  I0 W0 I1 W1 …          rank 0 begins I0 while rank 1 computes W0
#
#     bubble of p stages and m micro-batches  =  (p-1) (f + i)        or (p-1) (f + i + w) if W comes before the send
#
# The *bubble* is the time in which a rank waits; f, i and w are the seconds of F, I and W of a micro-batch. GPipe is
# the order drawn here: a rank computes all its forwards, then all its backwards.
#
# Papers: Huang et al., *GPipe*, arXiv 1811.06965; Qi et al., *Zero bubble pipeline parallelism*, arXiv 2401.10241.

# %%
import copy

import torch
import torch.distributed as dist
from torch import nn

import meshwise as mw
from classroom import run_mesh, run_plain
from meshwise.testing import agree, alone, outcome

STAGES, MICRO, ROWS, WIDTH = 4, 6, 12, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


torch.manual_seed(0)
START = nn.Sequential(*(Block() for _ in range(STAGES))).double()
x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).double()

# %% [markdown]
# ## One process

# %%
whole = copy.deepcopy(START)
(whole(x).square().sum() / x.numel()).backward()
expected = [[p.grad for p in block.parameters()] for block in whole]

# %% [markdown]
# ## By hand

# %%


def by_hand(group):
    rank, last = group.rank(), group.size() - 1
    stage = copy.deepcopy(START[rank])
    log, sends, kept, weights = [], [], [], list(stage.parameters())
    rows = x.chunk(MICRO)

    def send(tensor, to):
        sends.append((dist.isend(tensor, group=group, group_dst=to), tensor))  # does not wait

    for m in range(MICRO):
        taken = rows[m].clone()
        if rank > 0:
            dist.irecv(taken, group=group, group_src=rank - 1).wait()
        taken.requires_grad_()
        out = stage(taken)
        if rank < last:
            send(out.detach(), rank + 1)
        kept.append((taken, out))
        log.append(f"F{m}")
    gradients = [torch.zeros_like(p) for p in weights]
    for m in range(MICRO):
        taken, out = kept[m]
        if rank == last:
            slope = 2 * out.detach() / x.numel()  # of the loss
        else:
            slope = torch.empty_like(out)
            dist.irecv(slope, group=group, group_src=rank + 1).wait()
        if rank > 0:
            (back,) = torch.autograd.grad(out, taken, slope, retain_graph=True)  # I
            send(back, rank - 1)
            log.append(f"I{m}")
        for total, part in zip(gradients, torch.autograd.grad(out, weights, slope)):  # W, while `back` travels
            total += part
        log.append(f"W{m}")
        kept[m] = None
    for work, _ in sends:
        work.wait()
    return gradients, log


hand = run_plain(by_hand)
for stage, (gradients, log) in enumerate(hand):
    print(f"rank {stage} │{' '.join(log)}")
    for got, wanted in zip(gradients, expected[stage], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    assert stage == 0 or log.index("I0") < log.index("W0") < log.index("I1")
print("by hand: the gradients of one process, to 1e-9")

# %% [markdown]
# (`torch.autograd.grad` runs some parts of a stage twice here. The library keeps what I and W share.)
#
# ## With meshwise: the plan names the schedule

# %%


def loss(out, _):
    return out.square().sum(), out.numel()


single = alone(copy.deepcopy(START), loss=loss, batches=[x, x], lr=1e-2)


def with_meshwise(world, plan):
    options = mw.Options(example=x, cut=mw.CutOptions(at=("1", "2", "3")))
    trainer = mw.parallelize(copy.deepcopy(START), plan, loss=loss, world=world, options=options, lr=1e-2)
    return outcome(trainer, batches=[x, x]), str(trainer.cut)


for schedule in ("gpipe", "1f1b", "zb-h1"):
    plan = f"pp={STAGES} microbatches={MICRO} schedule={schedule}"
    figures, cut = run_mesh(lambda world, plan=plan: with_meshwise(world, plan))[0]
    agree(figures, single, bound=1e-9)
    print(f"{plan:40} the numbers of one process")
print(cut)

# %% [markdown]
# ## Exercise
#
# Write `answer(p, m)`: the fraction of a step in which a rank waits, with p stages and m micro-batches in the order of
# GPipe. Every forward takes one time on every stage, and every backward another.

# %%


def answer(p, m):
    return (p - 1) / m


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    got = answer(4, 8)
    if got == 3 / 8:
        return "that is the bubble over the ideal time, m; the step takes m + p - 1"
    if abs(got - 3 / 11) > 1e-12:
        return f"4 stages, 8 micro-batches: 3 of 11 slots are empty, not {got:.3f}"
    return "" if answer(1, 8) == 0 else "one stage waits for nobody"


print(check(answer) or "right")
