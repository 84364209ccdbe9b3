# %% [markdown]
# # 4. Data parallel training by hand
#
# Every rank has the whole model and its own rows of the batch. The gradient of a sum over rows is the sum of the
# gradients, so the ranks add up their gradients, and all of them make the same update.
#
#     gradient of the batch  =  (Σ over ranks of the gradient of the summed loss)  /  (Σ over ranks of the rows)
#
# Divide once, by the rows of the whole batch. The mean of the ranks' means is another number when shares are uneven.
# Here 10 rows are split as 3, 3, 2, 2.
#
# Paper: Li et al., *PyTorch Distributed: experiences on accelerating data parallel training*, VLDB 2020.

# %%
import copy

import torch
import torch.distributed as dist
from torch import nn

import meshwise as mw
from classroom import RANKS, run_mesh, run_plain

STEPS, ROWS = 3, 10


torch.manual_seed(0)
START = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def build():
    return copy.deepcopy(START)


generator = torch.Generator().manual_seed(1)
batches = [
    (torch.randn(ROWS, 6, generator=generator).double(), torch.randn(ROWS, 2, generator=generator).double())
    for _ in range(STEPS)
]

# %% [markdown]
# ## One process

# %%


def alone():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        ((model(x) - y).square().sum() / y.numel()).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


# %% [markdown]
# ## Four ranks: three more lines

# %%


def by_hand(group):
    rank, size = group.rank(), group.size()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches:
        mine_x, mine_y = x.tensor_split(size)[rank], y.tensor_split(size)[rank]  # 1. my rows
        optimizer.zero_grad()
        (model(mine_x) - mine_y).square().sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)  # 2. add up
            parameter.grad /= y.numel()  # 3. divide once, by the whole batch
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


# %% [markdown]
# ## With meshwise: the plan says it
#
# The loss returns a sum and a count; the library divides once.

# %%


def loss(output, batch):
    return (output - batch[1]).square().sum(), batch[1].numel()


def with_meshwise(world):
    trainer = mw.parallelize(
        build(), f"dp={RANKS}", loss=loss, optimizer=torch.optim.SGD, world=world, lr=0.1, momentum=0.9
    )
    for batch in batches:
        trainer.step(batch)
    return [value.clone() for _, value in trainer.full_parameters()]


single, hand, ours = alone(), run_plain(by_hand), run_mesh(with_meshwise)
for rank in range(RANKS):
    for one, two, three in zip(single, hand[rank], ours[rank], strict=True):
        torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(three, one, rtol=1e-9, atol=1e-12)
print(f"{len(single)} parameters after {STEPS} steps: one process, by hand and meshwise agree to 1e-9 on every rank")

# %% [markdown]
# ## Exercise
#
# Two ranks have summed losses 6.0 and 4.0 over 3 rows and 1 row. Write `answer(sums, rows)`: the loss of the batch,
# from lists with one entry for each rank.

# %%


def answer(sums, rows):
    return sum(s / r for s, r in zip(sums, rows)) / len(sums)


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    for sums, rows in (([6.0, 4.0], [3, 1]), ([6.0, 2.0], [3, 1]), ([5.0, 0.0], [5, 0])):
        try:
            got = answer(sums, rows)
        except ZeroDivisionError:
            return "a rank may have no rows at all; do not divide on each rank"
        wanted = sum(sums) / sum(rows)
        if abs(got - wanted) > 1e-12:
            return f"sums {sums} over {rows} rows give {wanted}, not {got}: this is a mean of means"
    return ""


print(check(answer) or "right")
