# %% [markdown]
# # 12. Tensor parallel, forward and backward by hand
#
# Two matrices in a row, `Z = gelu(X W) V`. Split W by columns and V by rows. Each rank then has its own columns of the
# middle, and its Z is one term of a sum:
#
#     forward     Y_r = gelu(X W_r)              nothing is sent
#                 Z   = Σ_r Y_r V_r              an all-reduce                (g)
#     backward    dY_r = dZ V_rᵀ, dV_r = Y_rᵀ dZ     nothing is sent
#                 dX  = Σ_r dY_r W_rᵀ            an all-reduce, which travels while dW_r = Xᵀ dY_r is computed   (f)
#
# f and g are a conjugate pair: f does nothing in the forward and an all-reduce in the backward, g the reverse.
#
# Paper: Shoeybi et al., *Megatron-LM*, arXiv 1909.08053.

# %%
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import meshwise as mw
from classroom import run_mesh, run_plain
from meshwise.testing import count

TOKENS, WIDTH, HIDDEN = 6, 8, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x):
        return self.blocks[0](x)


torch.manual_seed(0)
START = Model().double()
X = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).double()

# %% [markdown]
# ## One process: autograd

# %%
x = X.clone().requires_grad_()
z = START(x)
z.square().sum().backward()
dW, dV = START.blocks[0].up.weight.grad.T, START.blocks[0].down.weight.grad.T

# %% [markdown]
# ## By hand: no autograd at all
#
# The derivative of gelu is written out, and the all-reduce of dX is started before dW is computed.

# %%


def gelu_slope(a):
    cdf = 0.5 * (1 + torch.erf(a / 2**0.5))
    return cdf + a * torch.exp(-a * a / 2) / (2 * torch.pi) ** 0.5


def by_hand(group):
    rank, n = group.rank(), group.size()
    W = START.blocks[0].up.weight.detach().T.chunk(n, dim=1)[rank]  # columns
    V = START.blocks[0].down.weight.detach().T.chunk(n, dim=0)[rank]  # rows
    A = X @ W
    Y = functional.gelu(A)
    Z = Y @ V
    dist.all_reduce(Z, group=group)  # g
    Z = X + Z

    dZ = 2 * Z
    dY = dZ @ V.T
    my_dV = Y.T @ dZ
    dA = dY * gelu_slope(A)
    dX = (dA @ W.T).contiguous()
    travelling = dist.all_reduce(dX, group=group, async_op=True)  # f
    my_dW = X.T @ dA  # meanwhile
    travelling.wait()
    return Z, dZ + dX, my_dW, my_dV


hand = run_plain(by_hand)
for Z, dX, _, _ in hand:
    torch.testing.assert_close(Z, z.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(dX, x.grad, rtol=1e-9, atol=1e-12)
torch.testing.assert_close(torch.cat([part for _, _, part, _ in hand], dim=1), dW, rtol=1e-9, atol=1e-12)
torch.testing.assert_close(torch.cat([part for _, _, _, part in hand], dim=0), dV, rtol=1e-9, atol=1e-12)
print("by hand: Z, dX, dW and dV of one process, to 1e-9")

# %% [markdown]
# ## With meshwise: `tp=4`
#
# The library finds that `up` and `down` are a pair. A rule says it where it is not found: `{"blocks.*.up": "colwise"}`.

# %%


def with_meshwise(world):
    trainer = mw.parallelize(
        copy.deepcopy(START),
        "tp=4",
        loss=lambda out, _: (out.square().sum(), 1),
        world=world,
        lr=0.0,
        options=mw.Options(tensor_rules={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}),
    )
    with world.record() as records:
        trainer.step((X,))
    return {name: g.clone() for name, g in trainer.full_gradients()}, count(records)


gradients, counts = run_mesh(with_meshwise)[0]
torch.testing.assert_close(gradients["blocks.0.up.weight"].T, dW, rtol=1e-9, atol=1e-12)
torch.testing.assert_close(gradients["blocks.0.down.weight"].T, dV, rtol=1e-9, atol=1e-12)
print(counts)

# %% [markdown]
# The input of this model needs no gradient, so only the all-reduce of g is called: 6 · 8 numbers of 8 bytes. Deeper
# blocks call f too. The other call ends the step.
#
# ## Exercise
#
# The other way round: the **first** matrix split by rows, X by columns. Write `answer(X, W)` from the lists of the
# ranks' parts `X[r]` (tokens, K/n) and `W[r]` (K/n, N): the full product X W.

# %%


def answer(X, W):
    return torch.cat([x @ w for x, w in zip(X, W)], dim=1)


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    a, b = torch.arange(12.0).view(3, 4), torch.arange(8.0).view(4, 2)
    got, wanted = answer(list(a.chunk(2, dim=1)), list(b.chunk(2, dim=0))), a @ b
    if got.shape != wanted.shape:
        return f"the shape is {tuple(got.shape)}, not {tuple(wanted.shape)}: partial products are added, not joined"
    return "" if torch.equal(got, wanted) else f"{got.tolist()} is not {wanted.tolist()}"


print(check(answer) or "right")
