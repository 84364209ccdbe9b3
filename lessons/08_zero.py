# %% [markdown]
# # 8. ZeRO 1, 2 and 3 by hand
#
# Adam keeps 16 bytes for each parameter in fp32: 4 of the parameter, 4 of its gradient, 8 of its two moments. Data
# parallel ranks all keep the same. ZeRO lets each rank keep 1/n of it.
#
#     stage   split                       bytes of a rank       moved in a step, besides the all-reduce
#     0       nothing                     16 P                  all-reduce = reduce-scatter + all-gather
#     1       Adam's moments              8 P + 8 P/n           nothing more
#     2       and gradients               4 P + 12 P/n          nothing more
#     3       and parameters              16 P/n                one more all-gather of the parameters
#
# The idea is lesson 3: an all-reduce has two halves. Between them each rank has the sum of *its* part of the gradient.
# It updates that part there, and the second half sends around updated parameters in place of gradients.
#
# Paper: Rajbhandari et al., *ZeRO: memory optimizations toward training trillion parameter models*, arXiv 1910.02054.

# %%
import copy

import torch
import torch.distributed as dist
from torch import nn

import meshwise as mw
from classroom import RANKS, run_mesh, run_plain

torch.manual_seed(0)
START = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 8)).double()
P = sum(p.numel() for p in START.parameters())
batches = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(1)).double().unbind()
LR = 0.01


def flat(tensors):
    """All numbers of some tensors in one, and zeros up to a multiple of the ranks."""
    joined = torch.cat([t.detach().flatten() for t in tensors])
    return torch.cat([joined, joined.new_zeros(-len(joined) % RANKS)])


def fill(model, numbers):
    sizes = [p.numel() for p in model.parameters()]
    for p, part in zip(model.parameters(), numbers[: sum(sizes)].split(sizes)):
        p.data.copy_(part.view_as(p))


def loss_sum(model, x):
    return (model(x) - x).square().sum()


# %% [markdown]
# ## By hand: reduce-scatter, update, all-gather
#
# Stage 1 and 2 keep all parameters. Stage 2 differs only in that the whole gradient is freed at once. Stage 3 keeps its
# shard alone, and gathers before the forward. (A real one gathers one layer at a time, and again in the backward.)

# %%


def by_hand(group, stage):
    rank, n = group.rank(), group.size()
    model = copy.deepcopy(START)
    shard = flat(model.parameters()).chunk(n)[rank].clone()
    adam = torch.optim.Adam([shard.requires_grad_()], lr=LR)  # moments of 1/n of the numbers
    for x in batches:
        if stage == 3:
            parts = [torch.empty_like(shard) for _ in range(n)]
            dist.all_gather(parts, shard.detach(), group=group)
            fill(model, torch.cat(parts))
        model.zero_grad()
        loss_sum(model, x.chunk(n)[rank]).backward()
        shard.grad = torch.empty_like(shard)
        dist.reduce_scatter(shard.grad, list(flat(p.grad for p in model.parameters()).chunk(n)), group=group)
        shard.grad /= x.numel()
        if stage >= 2:
            model.zero_grad(set_to_none=True)  # the whole gradient is free
        adam.step()
        if stage == 3:
            fill(model, torch.full((P,), float("nan")).double())  # as good as freed
        else:
            parts = [torch.empty_like(shard) for _ in range(n)]
            dist.all_gather(parts, shard.detach(), group=group)
            fill(model, torch.cat(parts))
    kept = 2 * shard.numel() + (shard.numel() if stage >= 2 else P) + (shard.numel() if stage == 3 else P)
    return shard.detach(), kept


# %% [markdown]
# ## One process, and meshwise

# %%


def alone():
    model = copy.deepcopy(START)
    adam = torch.optim.Adam(model.parameters(), lr=LR)
    for x in batches:
        adam.zero_grad()
        (loss_sum(model, x) / x.numel()).backward()
        adam.step()
    return flat(model.parameters())


def with_meshwise(world, stage):
    trainer = mw.parallelize(
        copy.deepcopy(START),
        f"dp={RANKS} zero={stage}",
        loss=lambda out, x: ((out - x).square().sum(), x.numel()),
        optimizer=torch.optim.Adam,
        world=world,
        lr=LR,
    )
    for x in batches:
        trainer.step(x)
    memory = trainer.memory()
    kept = memory["parameters"] + memory["gradients"] + memory["optimizer"]
    return flat(value.clone() for _, value in trainer.full_parameters()), kept


single = alone()
print(f"{P} parameters in float64; kept by rank 0, in bytes")
print("stage   formula   by hand   meshwise")
formula = {1: 16 * P + 16 * P / RANKS, 2: 8 * P + 24 * P / RANKS, 3: 32 * P / RANKS}
for stage in (1, 2, 3):
    hand = run_plain(lambda group, stage=stage: by_hand(group, stage))
    ours = run_mesh(lambda world, stage=stage: with_meshwise(world, stage))
    torch.testing.assert_close(torch.cat([shard for shard, _ in hand]), single, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours[0][0], single, rtol=1e-9, atol=1e-12)
    by_us, theirs = 8 * hand[0][1], ours[0][1]
    print(f"{stage:5}   {formula[stage]:7.0f}   {by_us:7}   {theirs:8}")
    assert abs(by_us - formula[stage]) < 0.02 * by_us
    assert stage < 3 or theirs < 1.2 * by_us, "stage 3 keeps 1/n of everything"
print("all three stages have the parameters of one process, to 1e-9")

# %% [markdown]
# ## Exercise
#
# Mixed precision: bf16 parameters and gradients (2 bytes each), and 12 bytes of fp32 master and moments. Write
# `answer(P, n, stage)`: the bytes of a rank.

# %%


def answer(P, n, stage):
    return 16 * P / n


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    what = {0: "everything is whole", 1: "12 bytes are split", 2: "12 + 2 bytes are split", 3: "all 16 are split"}
    for stage, wanted in ((3, 1600.0), (0, 6400.0), (1, 2800.0), (2, 2200.0)):
        if (got := answer(400, 4, stage)) != wanted:
            return f"P=400, n=4, stage {stage}: {got}, and it should be {wanted}: {what[stage]}"
    return ""


print(check(answer) or "right")
