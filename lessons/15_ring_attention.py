# %% [markdown]
# # 15. Context parallel: ring attention, forward and backward by hand
#
# Every rank has the tokens of one block: queries, keys and values. Keys and values travel around a ring; each rank
# merges the attention of its queries to the block that is there. Merging needs the sum of exponentials, as its log:
#
#     lse = log(e^lse1 + e^lse2)          o = e^(lse1-lse) o1 + e^(lse2-lse) o2
#
# The backward needs the block, o, lse and the gradient do: with P = exp(S - lse) and D = rowsum(do · o)
#
#     dV = Pᵀ do        dS = P · (do Vᵀ - D)        dQ = dS K        dK = dSᵀ Q             (times the scale)
#
# dK and dV travel with their block until they are home. No rank ever has a matrix of all tokens by all tokens.
#
# Papers: Liu, Zaharia and Abbeel, *Ring attention*, arXiv 2310.01889; Dao, *FlashAttention-2*, arXiv 2307.08691.

# %%
import copy

import torch
import torch.distributed as dist
from torch.nn import functional

import meshwise as mw
from classroom import run_mesh, run_plain
from meshwise.attention import causal
from meshwise.attention.cp_attention import work_table
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, alone, outcome

T, D = 16, 8
generator = torch.Generator().manual_seed(0)
q, k, v, do = torch.randn(4, T, D, generator=generator).double().unbind()

# %% [markdown]
# ## One process

# %%
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
expected = functional.scaled_dot_product_attention(*(x[None] for x in leaves), is_causal=True)[0]
expected.backward(do)

# %% [markdown]
# ## By hand

# %%


def pass_on(group, *tensors):
    """Send tensors to the next rank, and return the tensors of the rank before."""
    rank, n = group.rank(), group.size()
    arrived = [torch.empty_like(x) for x in tensors]
    works = [dist.isend(x, group=group, group_dst=(rank + 1) % n) for x in tensors]
    works += [dist.irecv(x, group=group, group_src=(rank - 1) % n) for x in arrived]
    for work in works:
        work.wait()
    return arrived


def scores(q, k, mine, theirs):
    """Scaled scores of two blocks, -inf where the key is after the query."""
    rows, columns = (torch.arange(T // 4) + block * (T // 4) for block in (mine, theirs))
    return (q @ k.T / D**0.5).masked_fill(columns > rows[:, None], float("-inf"))


def ring(group):
    rank, n = group.rank(), group.size()
    Q, K, V, dO = (x.chunk(n)[rank].clone() for x in (q, k, v, do))
    o, lse = torch.zeros_like(Q), torch.full((len(Q), 1), float("-inf")).double()
    for step in range(n):  # forward
        block = (rank - step) % n  # whose keys are here
        if block <= rank:
            S = scores(Q, K, rank, block)
            one = S.logsumexp(dim=1, keepdim=True)
            both = torch.logaddexp(lse, one)
            o = (lse - both).exp() * o + (S - both).exp() @ V
            lse = both
        K, V = pass_on(group, K, V)  # after n steps they are home again
    dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
    delta = (dO * o).sum(dim=1, keepdim=True)
    for step in range(n):  # backward
        block = (rank - step) % n
        if block <= rank:
            P = (scores(Q, K, rank, block) - lse).exp()
            dS = P * (dO @ V.T - delta) / D**0.5
            dQ, dK, dV = dQ + dS @ K, dK + dS.T @ Q, dV + P.T @ dO
        K, V, dK, dV = pass_on(group, K, V, dK, dV)
    return o, dQ, dK, dV


hand = [torch.cat(parts) for parts in zip(*run_plain(ring))]
for got, wanted in zip(hand, [expected.detach(), *(x.grad for x in leaves)], strict=True):
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
print("by hand: o, dQ, dK and dV of one process, to 1e-9")

# %% [markdown]
# ## With meshwise: `cp=4 context=ring`, and the balance of the ranks
#
# In `ring` the last rank has the most pairs under a causal mask. `zigzag` gives every rank an early and a late block.

# %%
shape = GPTConfig(vocabulary=16, context=16, layers=1, heads=4, width=16)
torch.manual_seed(0)
START = GPT(shape).double()
tokens = torch.randint(16, (2, 17), generator=generator)
batches = [(tokens[:, :-1], tokens[:, 1:])] * 2
single = alone(copy.deepcopy(START), loss=next_token_loss, batches=batches, lr=1e-2)


def with_meshwise(world, plan):
    return outcome(
        mw.parallelize(copy.deepcopy(START), plan, loss=next_token_loss, world=world, lr=1e-2), batches=batches
    )


print("plan                     slowest rank over the mean")
work = {}
for context in ("ring", "zigzag", "ulysses"):
    plan = f"cp=4 context={context}"
    agree(run_mesh(lambda world, plan=plan: with_meshwise(world, plan))[0], single, bound=1e-9)
    work[context] = work_table(mw.Plan.parse(plan), pattern=causal(), length=4096).imbalance
    print(f"{plan:24} {work[context]:.3f}")
assert work["ring"] > 1.7 > 1.01 > work["zigzag"]
print("each has the numbers of one process")

# %% [markdown]
# ## Exercise
#
# 2n blocks on n ranks: write `answer(rank, n)`, the list of the two blocks of a rank, so that under a causal mask all
# ranks have the same number of pairs (block b has b + 1/2 pairs of blocks).

# %%


def answer(rank, n):
    return [2 * rank, 2 * rank + 1]


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    blocks = [sorted(answer(rank, 4)) for rank in range(4)]
    if sorted(sum(blocks, [])) != list(range(8)):
        return f"{blocks}: every block of 0 … 7 belongs to exactly one rank"
    work = [sum(b + 0.5 for b in own) for own in blocks]
    return "" if len(set(work)) == 1 else f"{blocks}: the ranks have {work} pairs of blocks, which is not even"


print(check(answer) or "right")
