# %% [markdown]
# # 16. Mixtures of experts
#
# A router sends each token to one of E small networks. Put E/n experts on each rank; tokens travel to their expert and
# back, by two all-to-alls. The backward sends gradients the same ways in reverse.
#
#     elements a rank sends, forward and backward   =  4 · T k h (n-1)/n        T tokens, k experts for each, h features
#
# Five layouts of the same mixture (figure 9 of the paper); only the plan differs:
#
#     data                        every rank has all experts, its own tokens
#     model                       every rank has a part of each expert, all tokens
#     model + data                both
#     expert + data               every rank has some experts, its own tokens         two all-to-alls
#     expert + model + data       all three
#
# Paper: Fedus, Zoph and Shazeer, *Switch transformers*, arXiv 2101.03961.

# %%
import copy

import torch
import torch.distributed as dist
from torch.nn import functional

import meshwise as mw
from classroom import run_mesh, run_plain
from meshwise.reference import MixtureConfig, MixtureGPT, next_token_loss
from meshwise.testing import agree, alone, outcome
from meshwise.view.text_pictures import expert_table

T, H, E = 12, 6, 4
generator = torch.Generator().manual_seed(0)
X = torch.randn(T, H, generator=generator).double()
experts = torch.randn(E, H, H, generator=generator).double()
router = torch.randn(H, E, generator=generator).double()
G = torch.randn(T, H, generator=generator).double()

# %% [markdown]
# ## One process


# %%
def mixture(x, matrices, choose, weight):
    out = torch.zeros_like(x)
    for e in range(E):
        mine = choose == e
        out[mine] = functional.gelu(x[mine] @ matrices[e])
    return out * weight


def routed(x):
    probability, choice = (x @ router).softmax(-1).max(-1)
    return choice, probability[:, None]


x, w = X.clone().requires_grad_(), experts.clone().requires_grad_()
expected = mixture(x, w, *routed(x))
expected.backward(G)

# %% [markdown]
# ## By hand: sort, count, send, compute, send back

# %%


class Exchange(torch.autograd.Function):
    """An all-to-all of rows with uneven parts; its backward is the all-to-all in the other direction."""

    @staticmethod
    def forward(ctx, x, give, take, group):
        ctx.sizes, ctx.group = (give, take), group
        out = x.new_empty(sum(take), x.size(1))
        dist.all_to_all_single(out, x.contiguous(), take, give, group=group)
        return out

    @staticmethod
    def backward(ctx, dy):
        give, take = ctx.sizes
        return Exchange.apply(dy, take, give, ctx.group), None, None, None


def by_hand(group):
    rank, n = group.rank(), group.size()
    x = X.chunk(n)[rank].clone().requires_grad_()
    own = experts[rank].clone().requires_grad_()  # one expert on each rank
    choice, weight = routed(x)
    order = choice.argsort(stable=True)  # tokens of the same expert together
    give = torch.bincount(choice, minlength=n)
    take = torch.empty_like(give)
    dist.all_to_all_single(take, give, group=group)  # how many will come
    give, take = give.tolist(), take.tolist()
    arrived = Exchange.apply(x[order], give, take, group)
    computed = functional.gelu(arrived @ own)
    back = Exchange.apply(computed, take, give, group)
    y = back[order.argsort()] * weight
    y.backward(G.chunk(n)[rank])
    return y.detach(), x.grad, own.grad, take


hand = run_plain(by_hand)
torch.testing.assert_close(torch.cat([y for y, *_ in hand]), expected.detach(), rtol=1e-9, atol=1e-12)
torch.testing.assert_close(torch.cat([dx for _, dx, *_ in hand]), x.grad, rtol=1e-9, atol=1e-12)
torch.testing.assert_close(torch.stack([dw for _, _, dw, _ in hand]), w.grad, rtol=1e-9, atol=1e-12)
loads = [sum(take) for *_, take in hand]
print(f"by hand: output and gradients of one process; tokens of each expert: {loads}")
assert sum(loads) == T

# %% [markdown]
# ## With meshwise: five plans, one model

# %%
torch.manual_seed(0)
shape = MixtureConfig(vocabulary=16, context=8, layers=1, heads=4, width=16, experts=4, choices=2)
START = MixtureGPT(shape).double()
tokens = torch.randint(16, (4, 9), generator=generator)
batches = [(tokens[:, :-1], tokens[:, 1:])] * 2
single = alone(copy.deepcopy(START), loss=next_token_loss, batches=batches, lr=1e-2)
LAYOUTS = {
    "data": "dp=4",
    "model": "tp=4 etp=4",
    "model + data": "dp=2 tp=2 etp=2",
    "expert + data": "dp=4 ep=4",
    "expert + model + data": "dp=2 tp=2 ep=2 etp=2",
}


def with_meshwise(world, plan):
    return outcome(
        mw.parallelize(copy.deepcopy(START), plan, loss=next_token_loss, world=world, lr=1e-2), batches=batches
    )


for name, plan in LAYOUTS.items():
    agree(run_mesh(lambda world, plan=plan: with_meshwise(world, plan))[0], single, bound=1e-9)
    print(f"{name:22} {plan:22} the numbers of one process")
print("\n" + expert_table(mw.Plan.parse(LAYOUTS["expert + model + data"]), experts=4))

# %% [markdown]
# ## Exercise
#
# An expert takes at most `ceil(capacity · tokens / experts)` tokens; later ones are dropped. Write
# `answer(choices, experts, capacity)`: for each token, True if it is kept. `choices` are the experts of the tokens in
# order.

# %%


def answer(choices, experts, capacity):
    return [True for _ in choices]


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    got = answer([0, 0, 0, 1, 0, 1], 2, 1.0)
    if got != [True, True, True, True, False, True]:
        return f"6 tokens, 2 experts, capacity 1: 3 tokens each, so only the fourth of expert 0 is dropped; not {got}"
    got = answer([0, 0, 0], 2, 1.0)
    return "" if got == [True, True, False] else f"ceil(3 / 2) = 2 tokens are kept, not {got}"


print(check(answer) or "right")
