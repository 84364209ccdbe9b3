# %% [markdown]
# # 14. Sequence parallel
#
# Between the pairs of matrices of lesson 12 every rank has all hidden states, and computes the same norm and dropout.
# Split the tokens there. The all-reduce becomes its two halves, at two places, and the same bytes are sent:
#
#     tensor parallel       norm (all tokens)  ─ W_r ─ V_r ─ all-reduce ─ norm (all tokens)
#     sequence parallel     norm (T/n tokens)  ─ all-gather ─ W_r ─ V_r ─ reduce-scatter ─ norm (T/n tokens)
#
#     activations of a layer outside of the pairs   T h   becomes   T h / n
#
# Paper: Korthikanti et al., *Reducing activation recomputation in large transformer models*, arXiv 2205.05198.

# %%
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import meshwise as mw
from classroom import run_mesh, run_plain
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import SavedForBackward, agree, alone, outcome

T, H = 8, 8
torch.manual_seed(0)
norm = nn.LayerNorm(H).double()
W, V = (torch.randn(H, 4 * H) / H).double(), (torch.randn(4 * H, H) / H).double()
X = torch.randn(T, H).double()
expected = X + functional.gelu(norm(X) @ W) @ V
G = torch.randn(T, H).double()  # gradient of the output
expected.backward(G)
norm_gradient = norm.weight.grad

# %% [markdown]
# ## By hand: two autograd functions, each the backward of the other

# %%


class Gather(torch.autograd.Function):
    """All-gather of the tokens; its backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, dy):
        return scattered(dy, ctx.group), None


class Scatter(torch.autograd.Function):
    """Reduce-scatter of the tokens; its backward is an all-gather."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx, dy):
        return Gather.apply(dy, ctx.group), None


def scattered(x, group):
    parts = [part.contiguous() for part in x.chunk(group.size())]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, group=group)
    return out


def by_hand(group):
    rank, n = group.rank(), group.size()
    own_norm = copy.deepcopy(norm)
    own_norm.zero_grad()
    x = X.chunk(n)[rank]
    w, v = W.chunk(n, dim=1)[rank], V.chunk(n, dim=0)[rank]
    y = x + Scatter.apply(functional.gelu(Gather.apply(own_norm(x), group) @ w) @ v, group)
    y.backward(G.chunk(n)[rank])
    dist.all_reduce(own_norm.weight.grad, group=group)  # each rank has seen only its tokens
    return y.detach(), own_norm.weight.grad


hand = run_plain(by_hand)
torch.testing.assert_close(torch.cat([y for y, _ in hand]), expected.detach(), rtol=1e-9, atol=1e-12)
torch.testing.assert_close(hand[0][1], norm_gradient, rtol=1e-9, atol=1e-12)
print("by hand: output and the norm's gradient of one process")

# %% [markdown]
# ## With meshwise: `sequence_parallel=1`

# %%
shape = GPTConfig(vocabulary=16, context=16, layers=2, heads=4, width=32)
START = GPT(shape).double()
tokens = torch.randint(16, (2, 17))
batches = [(tokens[:, :-1], tokens[:, 1:])]
single = alone(copy.deepcopy(START), loss=next_token_loss, batches=batches, lr=1e-3)


def with_meshwise(world, plan):
    trainer = mw.parallelize(copy.deepcopy(START), plan, loss=next_token_loss, world=world, lr=1e-3)
    figures = outcome(trainer, batches=batches)
    with SavedForBackward(trainer.model) as saved:
        trainer.step(batches[0])
    return figures, saved.bytes


kept = {}
for plan in ("tp=4", "tp=4 sequence_parallel=1"):
    figures, kept[plan] = run_mesh(lambda world, plan=plan: with_meshwise(world, plan))[0]
    agree(figures, single, bound=1e-9)
    print(f"{plan:26} {kept[plan]:,} bytes kept for the backward on rank 0")
assert kept["tp=4 sequence_parallel=1"] < 0.7 * kept["tp=4"]

# %% [markdown]
# ## Exercise
#
# Per token of a layer of width h, activations of 2 bytes: 10 h bytes outside of the pairs, 24 h inside (without the
# scores of attention). Write `answer(tokens, h, n, sequence_parallel)`: bytes of one layer on one of n ranks.

# %%


def answer(tokens, h, n, sequence_parallel):
    return tokens * h * 34 / n


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    got = answer(10, 1, 4, True)
    if got != 85:
        return f"with sequence parallelism all 34 h are split: 85, not {got}"
    got = answer(10, 1, 4, False)
    return "" if got == 160 else f"without it the 10 h outside of the pairs are whole on each rank: 160, not {got}"


print(check(answer) or "right")
