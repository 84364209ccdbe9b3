# %% [markdown]
# # 11. Half precision and loss scaling
#
# Two formats have 16 bits. fp16 has 10 bits of fraction and small exponents: below 6e-8 it is zero, above 65504 it is
# infinite. bf16 has the range of fp32 and 7 bits of fraction.
#
#     a small update is lost         1 + 0.001 = 1 in bf16, so masters are kept in fp32
#     a small gradient is lost       1e-8 = 0 in fp16, so the loss is multiplied by a scale S, the gradient divided by S
#     a large one overflows          the step is skipped, and S is lowered; after many good steps it doubles
#
# Paper: Micikevicius et al., *Mixed precision training*, arXiv 1710.03740.

# %%
import copy

import torch
import torch.distributed as dist
from torch import nn

import meshwise as mw
from classroom import run_mesh, run_plain

for dtype in (torch.float16, torch.bfloat16, torch.float32):
    info = torch.finfo(dtype)
    kept = (torch.ones((), dtype=dtype) + 1e-3).item()
    small = torch.tensor(1e-8).to(dtype).item()
    print(f"{dtype!s:16} largest {info.max:.1e}, 1 + 0.001 = {kept:.4f}, 1e-8 becomes {small:.1e}")
assert torch.tensor(1e-8).half() == 0 != torch.tensor(1e-8).bfloat16()
assert torch.ones((), dtype=torch.bfloat16) + 1e-3 == 1

# %% [markdown]
# ## By hand: masters, a scale, and one decision for all ranks
#
# The overflow must be seen by all ranks, or some would update and others would not. So the reduced gradient decides.

# %%
torch.manual_seed(0)
START = nn.Linear(16, 4, bias=False)
x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
target = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
TINY = 1e-9  # a loss so small that its gradients are below the range of fp16


def by_hand(group, scale):
    rank, n = group.rank(), group.size()
    model = copy.deepcopy(START).half()
    master = START.weight.detach().clone()  # fp32
    history = []
    for _ in range(8):
        model.weight.data.copy_(master)  # rounds
        model.zero_grad()
        out = model(x.chunk(n)[rank].half()).float()
        loss = TINY * (out - target.chunk(n)[rank]).square().sum() / target.numel()
        (loss * scale).backward()
        gradient = model.weight.grad.float()
        dist.all_reduce(gradient, group=group)
        if torch.isfinite(gradient).all():
            master -= 1e7 * gradient / scale
            history.append(("update", scale))
        else:
            history.append(("skipped", scale))
            scale /= 2**4
    return master, history


unscaled, _ = run_plain(lambda group: by_hand(group, 1.0))[0]
print(f"without a scale the parameters move by {float((unscaled - START.weight.detach()).abs().max()):.1e}")
assert torch.equal(unscaled, START.weight.detach()), "every gradient was zero"
results = run_plain(lambda group: by_hand(group, 2.0**48))
print("with one:", ", ".join(f"{what} at 2^{torch.tensor(scale).log2():.0f}" for what, scale in results[0][1]))
assert results[0][1][0][0] == "skipped"
assert results[0][1][-1][0] == "update"
assert all(torch.equal(results[0][0], other) for other, _ in results), "all ranks decided alike"
moved = float((results[0][0] - START.weight.detach()).abs().max())
assert moved > 1e-3, moved

# %% [markdown]
# ## With meshwise: `precision=fp16`, with the scale in `Options(loss_scale=…)`

# %%


def loss(out, batch):
    return (out.float() - batch[1]).square().sum(), batch[1].numel()


def train(world, precision):
    options = mw.Options(loss_scale=mw.LossScale(2.0**24), nonfinite="skip:20")
    plan = f"dp=4 precision={precision}"
    trainer = mw.parallelize(
        copy.deepcopy(START), plan, loss=loss, optimizer=torch.optim.SGD, options=options, world=world, lr=0.5
    )
    results = []
    while sum(not result.skipped for result in results) < 30:
        results.append(trainer.step((x, target)))
    return [result.loss for result in results], sum(result.skipped for result in results)


print("precision   first    last   skipped steps")
last = {}
for precision in ("fp32", "bf16", "fp16"):
    losses, skipped = run_mesh(lambda world, p=precision: train(world, p))[0]
    last[precision] = losses[-1]
    print(f"{precision:9}  {losses[0]:.4f}  {losses[-1]:.4f}   {skipped}")
assert all(abs(value - last["fp32"]) < 0.05 * last["fp32"] for value in last.values())

# %% [markdown]
# ## Exercise
#
# Write `answer(scale, good, finite, patience)`: the pair (scale, good) after a step. An overflow halves the scale and
# sets the count of good steps to 0. After `patience` good steps the scale doubles, and the count begins again.

# %%


def answer(scale, good, finite, patience):
    return scale, good + 1


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    if answer(8.0, 5, False, 10) != (4.0, 0):
        return f"an overflow at scale 8 gives (4.0, 0), not {answer(8.0, 5, False, 10)}"
    if answer(8.0, 5, True, 10) != (8.0, 6):
        return f"good step 6 of 10 only counts: (8.0, 6), not {answer(8.0, 5, True, 10)}"
    got = answer(8.0, 9, True, 10)
    return "" if got == (16.0, 0) else f"the tenth good step gives (16.0, 0), not {got}"


print(check(answer) or "right")
