# %% [markdown]
# # 6. Batch size and learning rate
#
# More ranks mean a larger batch. The gradient of a batch of B samples is the true gradient g plus noise:
#
#     E |gradient of B samples|²  =  |g|² + tr(Σ) / B              Σ: the variance of one sample's gradient
#     noise scale                 =  tr(Σ) / |g|²                  about the critical batch
#
# Below the critical batch, twice the batch allows twice the learning rate, and half the steps reach the same loss.
# Far above it, a larger batch saves no steps.
#
# Papers: McCandlish et al., *An empirical model of large-batch training*, arXiv 1812.06162; Goyal et al., *Accurate,
# large minibatch SGD*, arXiv 1706.02677 (linear scaling and warm-up).

# %%
import torch
import torch.distributed as dist
from torch import nn

import meshwise as mw
from classroom import run_mesh, run_plain

FEATURES, ROWS = 20, 64
generator = torch.Generator().manual_seed(0)
true = torch.randn(FEATURES, 1, generator=generator).double()


def batch_of(rows):
    x = torch.randn(rows, FEATURES, generator=generator).double()
    return x, x @ true + torch.randn(rows, 1, generator=generator).double()


def build():
    layer = nn.Linear(FEATURES, 1, bias=False).double()
    nn.init.zeros_(layer.weight)
    return layer


# %% [markdown]
# ## By hand: the noise scale from two batch sizes
#
# Every rank knows the squared norm of its own gradient (b = B/4 samples). After the all-reduce all know the squared
# norm of the mean gradient (B samples). Two equations, two unknowns.

# %%
batch = batch_of(ROWS)


def by_hand(group):
    x, y = (part.chunk(group.size())[group.rank()] for part in batch)
    model = build()
    ((model(x) - y).square().sum() / len(x)).backward()
    gradient = model.weight.grad
    small = gradient.square().sum()
    dist.all_reduce(gradient, group=group)
    gradient /= group.size()
    dist.all_reduce(small, group=group)
    small, large = float(small) / group.size(), float(gradient.square().sum())
    b, B = len(x), ROWS
    signal = (B * large - b * small) / (B - b)
    noise = (small - large) / (1 / b - 1 / B)
    return noise / signal


# %% [markdown]
# ## With meshwise
#
# `Options(noise=True)` measures it in every step, within the all-reduce that a step makes anyway.

# %%


def loss(output, batch):
    return (output - batch[1]).square().sum(), batch[1].numel()


def with_meshwise(world):
    options = mw.Options(noise=True)
    trainer = mw.parallelize(
        build(), "dp=4", loss=loss, optimizer=torch.optim.SGD, options=options, world=world, lr=0.0
    )
    return trainer.step(batch).noise.scale


hand, ours = run_plain(by_hand)[0], run_mesh(with_meshwise)[0]
print(f"noise scale by hand {hand:.3f}, of the library {ours:.3f} samples")
assert abs(hand - ours) < 1e-9 * abs(hand)

# %% [markdown]
# ## Steps to a loss, over the batch size
#
# The learning rate grows with the batch, up to a limit that keeps the training stable.

# %%


def steps_to(goal, rows, lr):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(1, 2000):
        x, y = batch_of(rows)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        if float((model.weight.detach().T - true).square().sum()) < goal:
            return step
    return 2000


print("batch   lr     steps   samples")
steps = {}
for rows in (4, 8, 16, 64, 256):
    lr = min(0.01 * rows / 4, 0.15)
    steps[rows] = steps_to(0.5, rows, lr)
    print(f"{rows:5}   {lr:.3f}  {steps[rows]:5}   {rows * steps[rows]:7}")
assert steps[8] < 0.75 * steps[4], "below the critical batch a larger batch saves steps"
assert 256 * steps[256] > 4 * 16 * steps[16], "far above it, it costs samples"

# %% [markdown]
# `meshwise batch job.toml` makes such a table of your own job.
#
# ## Exercise
#
# Write `answer(step, warmup, base, batch, base_batch)`: the learning rate of linear scaling with a linear warm-up. Step
# 1 has 1/warmup of the full rate; from step `warmup` on it is full.

# %%


def answer(step, warmup, base, batch, base_batch):
    return base * batch / base_batch


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    full = answer(100, 10, 0.1, 256, 32)
    if abs(full - 0.8) > 1e-12:
        return f"8 times the batch takes 8 times the rate, 0.8; you have {full}"
    if abs(answer(1, 10, 0.1, 256, 32) - 0.08) > 1e-12:
        return "step 1 of a warm-up of 10 has a tenth of the full rate, 0.08"
    return "" if abs(answer(10, 10, 0.1, 256, 32) - 0.8) < 1e-12 else "step 10 has the full rate"


print(check(answer) or "right")
