# %% [markdown]
# # 7. Stale gradients
#
# A rank that does not wait computes its gradient at old parameters. Let the update use the gradient of τ steps ago:
#
#     w(t+1)  =  w(t) - lr · gradient at w(t - τ)
#
# For a quadratic loss with curvature c this is stable only for `lr · c < 2 sin(π / (2 (2τ + 1)))`. With τ = 0 that is
# 2. With τ = 1 it is 1, and it falls as about π / (2τ): twice the delay needs half the learning rate.
#
# Papers: Recht et al., *Hogwild*, 2011; Ho et al., *More effective distributed ML via a stale synchronous parallel
# parameter server*, NIPS 2013; Yang et al., *PipeMare*, arXiv 1910.05124 (the bound).

# %%
import math

import torch
import torch.distributed as dist

import meshwise as mw
from classroom import run_mesh, run_plain

# %% [markdown]
# ## The bound, by experiment

# %%


def grows(lr, tau, steps=4000):
    """Whether w grows when the loss is w²/2, so that the gradient is w."""
    w = [1.0] * (tau + 1)
    for _ in range(steps):
        w.append(w[-1] - lr * w[-1 - tau])
        if abs(w[-1]) > 1e6:
            return True
    return max(map(abs, w[-10:])) > 1.0


for tau in (0, 1, 2, 4):
    bound = 2 * math.sin(math.pi / (2 * (2 * tau + 1)))
    assert not grows(0.97 * bound, tau)
    assert grows(1.03 * bound, tau)
    print(f"delay {tau}: stable up to a learning rate of {bound:.3f}")

# %% [markdown]
# ## By hand: an all-reduce that is one step late
#
# The gradients of a step travel during the next step. Nobody waits for a link, and every update is one step late.

# %%
generator = torch.Generator().manual_seed(0)
X = torch.randn(64, 8, generator=generator).double()
Y = X @ torch.randn(8, generator=generator).double()


def late(group, lr, steps=60, delay=1):
    x, y = (t.chunk(group.size())[group.rank()] for t in (X, Y))
    w, waiting, losses = torch.zeros(8).double(), [], []
    for _ in range(steps):
        gradient = x.T @ (x @ w - y) / len(X)
        waiting.append((dist.all_reduce(gradient, group=group, async_op=True), gradient))
        if len(waiting) > delay:
            work, old = waiting.pop(0)
            work.wait()
            w = w - lr * old
        losses.append(float((X @ w - Y).square().mean()))
    for work, _ in waiting:
        work.wait()
    return w, losses


fresh = run_plain(lambda group: late(group, lr=0.5, delay=0))
stale = run_plain(lambda group: late(group, lr=0.5, delay=1))
print(f"loss after 60 steps: fresh {fresh[0][1][-1]:.2e}, one step late {stale[0][1][-1]:.2e}")
assert all(torch.equal(stale[0][0], other) for other, _ in stale), "late, but the same on every rank"
slow = max(run_plain(lambda group: late(group, lr=1.05, delay=1))[0][1])
safe = run_plain(lambda group: late(group, lr=1.05, delay=0))[0][1]
print(f"at lr 1.05: fresh {safe[-1]:.2e}, one step late up to {slow:.2e}")
assert slow > 100 * safe[0], "the late updates diverge where the fresh ones converge"
assert safe[-1] < 1e-6

# %% [markdown]
# ## With meshwise
#
# A plan such as `dp=4` waits: its updates are the fresh ones, at every learning rate. Under `staleness=1` workers push
# their gradients to a server, which applies each as it comes.

# %%


def with_meshwise(world, plan, lr):
    model = torch.nn.Linear(8, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    trainer = mw.parallelize(
        model,
        plan,
        loss=lambda out, batch: ((out[:, 0] - batch[1]).square().sum() / 2, len(batch[1])),
        optimizer=torch.optim.SGD,
        world=world,
        lr=lr,
    )
    for _ in range(60):
        trainer.step((X, Y))
    return dict(trainer.full_parameters())["weight"][0].clone(), trainer.update_log()


found, _ = run_mesh(lambda world: with_meshwise(world, "dp=4", lr=0.5))[0]
torch.testing.assert_close(found, fresh[0][0], rtol=1e-9, atol=1e-12)
print("meshwise: the parameters of fresh updates")
late_weight, [log] = run_mesh(lambda world: with_meshwise(world, "dp=3 server=1 staleness=1", lr=0.1))[0]
missed = [row.applied - row.read - 1 for row in log]
print(f"three workers and a server: {len(log)} updates, each missed up to {max(missed)} others before it")
assert len(log) == 3 * 60
loss = float((X @ late_weight - Y).square().mean())
print(f"loss after 60 steps at lr 0.1: {loss:.2e}")
assert loss < 1e-2

# %% [markdown]
# ## Exercise
#
# Bounded staleness: a rank with clock c may go on if no other rank is more than s steps behind. Write
# `answer(clocks, s)`: the ranks that may compute their next step now.

# %%


def answer(clocks, s):
    return list(range(len(clocks)))


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    for clocks, s, wanted in (([3, 5, 4], 1, [0, 2]), ([3, 5, 4], 2, [0, 1, 2]), ([2, 2, 2], 0, [0, 1, 2])):
        if (got := answer(clocks, s)) != wanted:
            return f"clocks {clocks} with s={s}: ranks {wanted} may go on, not {got}; the slowest has {min(clocks)}"
    return ""


print(check(answer) or "right")
