# %% [markdown]
# # 22. Fewer bytes: compression, local steps, servers
#
# Where links are slow, send less, or less often. Each method below is another algorithm than synchronous training. So
# it is compared in three ways: with the same algorithm written for one process (a replay), by a law that must hold, and
# with the library's line.
#
#     top-k with error feedback    send the k largest of  gradient + error;  keep the rest as the new error
#                                  law: sum of what was sent + errors that are left = sum of all gradients
#     local SGD                    H steps alone, then the mean of the parameters;       H = 1 is synchronous SGD
#     DiLoCo                       H steps alone, then an outer step with momentum along the mean difference
#     parameter server             one rank keeps the parameters; the others send gradients and fetch parameters
#
# Papers: Lin et al., *Deep gradient compression*, arXiv 1712.01887; Stich, *Local SGD converges fast*, arXiv
# 1805.09767; Douillard et al., *DiLoCo*, arXiv 2311.08105; Li et al., *Scaling distributed machine learning with the
# parameter server*, OSDI 2014.

# %%
import torch
import torch.distributed as dist

import meshwise as mw
from classroom import RANKS, run_mesh, run_plain

D, STEPS, LR = 64, 24, 0.2
generator = torch.Generator().manual_seed(0)
X = torch.randn(256, D, generator=generator).double()
Y = X @ torch.randn(D, generator=generator).double()


def gradient(w, rank):
    """Gradient of the mean squared error on the rows of one rank, so that the mean over ranks is that of all rows."""
    x, y = X.chunk(RANKS)[rank], Y.chunk(RANKS)[rank]
    return x.T @ (x @ w - y) / len(x)


def loss(w):
    return float((X @ w - Y).square().mean())


def mean(x, group):
    dist.all_reduce(x, group=group)
    return x / group.size()


def zeros():
    return torch.zeros(D).double()


# %% [markdown]
# ## Top-k with error feedback
#
# Each rank sums one part of the gradient, as in a reduce-scatter. So of each part a rank sends the k/4 largest numbers.


# %%
def largest(x, k):
    kept = zeros()
    for part, of_part in zip(x.chunk(RANKS), kept.chunk(RANKS), strict=True):
        index = part.abs().topk(k // RANKS).indices
        of_part[index] = part[index]
    return kept


def top_k(group, k):
    w, error, sent_all, seen_all = zeros(), zeros(), zeros(), zeros()
    for _ in range(STEPS):
        g = gradient(w, group.rank())
        sent = largest(g + error, k)
        error = g + error - sent
        sent_all, seen_all = sent_all + sent, seen_all + g
        w = w - LR * mean(sent.clone(), group)  # a real one sends k values and k indices
    torch.testing.assert_close(sent_all + error, seen_all, rtol=1e-12, atol=1e-12)  # the law, on every rank
    return w


def top_k_replay(k):
    w, errors = zeros(), [zeros() for _ in range(RANKS)]
    for _ in range(STEPS):
        total = zeros()
        for rank in range(RANKS):
            g = gradient(w, rank) + errors[rank]
            sent = largest(g, k)
            errors[rank], total = g - sent, total + sent
        w = w - LR * total / RANKS
    return w


print("sent of 64   loss")
for k in (64, 16, 4):
    w = run_plain(lambda group, k=k: top_k(group, k))[0]
    torch.testing.assert_close(w, top_k_replay(k), rtol=1e-9, atol=1e-12)
    print(f"{k:10}   {loss(w):.4f}")

# %% [markdown]
# ## Local SGD and DiLoCo


# %%
def local(group, H, momentum=0.0, outer=1.0):
    w, velocity, calls = zeros(), zeros(), 0
    for _ in range(STEPS // H):
        own = w
        for _ in range(H):
            own = own - LR * gradient(own, group.rank())
        delta, calls = mean(w - own, group), calls + 1
        velocity = momentum * velocity + delta
        w = w - outer * (delta + momentum * velocity if momentum else delta)  # Nesterov's momentum
    return w, calls


def local_replay(H, momentum=0.0, outer=1.0):
    w, velocity = zeros(), zeros()
    for _ in range(STEPS // H):
        owns = [w] * RANKS
        for _ in range(H):
            owns = [own - LR * gradient(own, rank) for rank, own in enumerate(owns)]
        delta = w - sum(owns) / RANKS
        velocity = momentum * velocity + delta
        w = w - outer * (delta + momentum * velocity if momentum else delta)
    return w


print("method      calls   loss")
for name, setting in {"each step": (1,), "local, 4": (4,), "DiLoCo, 4": (4, 0.5, 0.7)}.items():
    w, calls = run_plain(lambda group, setting=setting: local(group, *setting))[0]
    torch.testing.assert_close(w, local_replay(*setting), rtol=1e-9, atol=1e-12)
    print(f"{name:11} {calls:5}   {loss(w):.4f}")

# %% [markdown]
# ## A parameter server: rank 0


# %%
def server(group):
    w = zeros()
    for _ in range(STEPS):
        g = zeros() if group.rank() == 0 else gradient(w, group.rank())
        dist.reduce(g, group_dst=0, group=group)  # the workers push
        if group.rank() == 0:
            w = w - LR * g / (RANKS - 1)
        dist.broadcast(w, group_src=0, group=group)  # and pull
    return w


w = zeros()
for _ in range(STEPS):
    w = w - LR * sum(gradient(w, rank) for rank in range(1, RANKS)) / (RANKS - 1)
torch.testing.assert_close(run_plain(server)[0], w, rtol=1e-9, atol=1e-12)
print(f"server: loss {loss(w):.4f}; its link carries {2 * (RANKS - 1)} tensors a step, a ring's links 2 (n-1)/n each")

# %% [markdown]
# ## With meshwise
#
# Each method is a word of a plan; the server's is `dp=3 server=1`. The same model, loss and optimizer run under the
# others, and give the numbers of the replays above.


# %%
def with_meshwise(plan, **sync):
    def train(world):
        model = torch.nn.Linear(D, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        options = mw.Options(sync=sync)
        trainer = mw.parallelize(
            model, plan, loss=half_square, optimizer=torch.optim.SGD, world=world, lr=LR, options=options
        )
        for _ in range(STEPS):
            trainer.step((X, Y))
        return next(value[0].clone() for _, value in trainer.full_parameters())

    return run_mesh(train)[0]


def half_square(output, batch):
    return (output[:, 0] - batch[1]).square().sum() / 2, len(batch[1])


for plan, sync, replay in (
    ("dp=4", {}, local_replay(1)),
    ("dp=4 zero=1 wire=topk:0.25", {}, top_k_replay(D // 4)),
    ("dp=4 sync=local every=4", {}, local_replay(4)),
    ("dp=4 sync=diloco every=4", {"outer_lr": 0.7, "outer_momentum": 0.5}, local_replay(4, 0.5, 0.7)),
):
    torch.testing.assert_close(with_meshwise(plan, **sync), replay, rtol=1e-9, atol=1e-12)
    print(f"{plan:28} the numbers of the replay, to 1e-9")

# %% [markdown]
# ## Exercise
#
# One bit for each number: write `answer(x, error)`, which returns (sent, new error). Sent is the sign of x + error
# times the mean of its absolute values.

# %%


def answer(x, error):
    return x.sign() * x.abs().mean(), error


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    x, error = torch.tensor([1.0, -3.0, 2.0]), torch.tensor([0.5, 0.0, -4.0])
    sent, left = answer(x, error)
    if not torch.allclose(sent + left, x + error):
        return "sent + new error must be x + error, or a part of the gradient is lost for ever"
    wanted = torch.tensor([1.0, -1.0, -1.0]) * 6.5 / 3
    return "" if torch.allclose(sent, wanted) else f"sent {sent.tolist()}, not {wanted.tolist()}"


print(check(answer) or "right")
