# %% [markdown]
# # 3. An all-reduce is a reduce-scatter and an all-gather
#
# A ring of n ranks adds up a tensor of S bytes in 2 (n-1) steps. In each step every rank sends S/n bytes to the next
# rank. After the first n-1 steps each rank has one part of the sum: that is a reduce-scatter. The other n-1 steps pass
# the parts around: that is an all-gather.
#
#     bytes that a rank sends   =  2 (n-1)/n · S          nearly independent of n
#     all to one rank and back  =  2 (n-1) · S            through one link
#
# Paper: Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, 2009.

# %%
import torch
import torch.distributed as dist

from classroom import RANKS, run_mesh, run_plain
from meshwise.testing import count

S = 12  # elements; a part is S / n


def tensor_of(rank):
    return torch.arange(float(S)) * (rank + 1)


# %% [markdown]
# ## By hand: a ring of messages
#
# In step s of the first half, rank r sends part r - s and adds the part r - s - 1 that arrives.

# %%


def pass_on(group, part):
    """Send a tensor to the next rank of the ring, and return the tensor of the rank before."""
    rank, size = group.rank(), group.size()
    arrived = torch.empty_like(part)
    sending = dist.isend(part, group=group, group_dst=(rank + 1) % size)
    dist.irecv(arrived, group=group, group_src=(rank - 1) % size).wait()
    sending.wait()
    return arrived


def ring(group):
    rank, n = group.rank(), group.size()
    parts = list(tensor_of(rank).chunk(n))
    sent = 0
    for step in range(n - 1):  # reduce-scatter
        arrived = pass_on(group, parts[(rank - step) % n])
        parts[(rank - step - 1) % n] = parts[(rank - step - 1) % n] + arrived
        sent += arrived.nbytes
    scattered = parts[(rank + 1) % n].clone()
    for step in range(n - 1):  # all-gather
        arrived = pass_on(group, parts[(rank + 1 - step) % n])
        parts[(rank - step) % n] = arrived
        sent += arrived.nbytes
    return torch.cat(parts), scattered, sent


results = run_plain(ring)
total = sum(tensor_of(rank) for rank in range(RANKS))
for whole, _, sent in results:
    assert torch.equal(whole, total)
    assert sent == 2 * (RANKS - 1) * S * 4 // RANKS
print(f"every rank has the sum {total.tolist()}")
print(f"after the first half rank 0 has only part 1: {results[0][1].tolist()}")
print(f"a rank sent {results[0][2]} bytes of a tensor of {S * 4}; through one rank it would be {2 * 3 * S * 4}")

# %% [markdown]
# ## With meshwise
#
# `reduce_scatter` and `all_gather` give the numbers of `all_reduce`. Every call is recorded, so a formula can be
# compared with what was called.

# %%


def both(world):
    x = tensor_of(world.rank)
    with world.record() as records:
        part, whole = torch.empty(S // 4), torch.empty(S)
        world.reduce_scatter(x, into=part, axes="rank").wait()
        world.all_gather(part, into=whole, axes="rank").wait()
        world.all_reduce(x, axes="rank").wait()
    return whole, x, count(records)


for whole, reduced, counts in run_mesh(both):
    assert torch.equal(whole, total)
    assert torch.equal(reduced, total)
    counts.check({"all_gather[rank]": (1, 48), "all_reduce[rank]": (1, 48), "reduce_scatter[rank]": (1, 48)})
print(counts)

# %% [markdown]
# Lesson 8 uses the two halves: ZeRO does something between them.
#
# ## Exercise
#
# Two levels: n ranks in a node, and N nodes. First a reduce-scatter in the node, then an all-reduce over the nodes,
# then an all-gather in the node. Write `answer(S, n, N)`: the bytes that a rank sends to **other nodes**.

# %%


def answer(S, n, N):
    return 2 * (N - 1) / N * S


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    got = answer(960, 8, 4)
    if got == 2 * 3 / 4 * 960:
        return "this is an all-reduce of the whole tensor; after the reduce-scatter a rank has S/n bytes"
    if got != 180:
        return f"S=960, n=8, N=4: {got}, and it should be 180"
    return "" if answer(960, 8, 1) == 0 else "with one node nothing is sent to others"


print(check(answer) or "right")
