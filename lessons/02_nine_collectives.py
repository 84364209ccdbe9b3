# %% [markdown]
# # 2. Nine collectives
#
# A collective is an operation that all ranks of a group call together. Nine of them carry all of parallel training.
# They are drawn here with one letter for each part of a tensor, and then run.
#
#                     before                        after
#                     rank 0  1   2   3             rank 0     1     2     3
#     broadcast       a   .   .   .                 a     a     a     a
#     reduce          a   b   c   d                 a+b+c+d .   .     .
#     all-reduce      a   b   c   d                 a+b+c+d on every rank
#     scatter         abcd .  .   .                 a     b     c     d
#     gather          a   b   c   d                 abcd  .     .     .
#     all-gather      a   b   c   d                 abcd on every rank
#     reduce-scatter  every rank abcd, its own      Σa    Σb    Σc    Σd
#     all-to-all      rank r has r0 r1 r2 r3        00 10 20 30 on rank 0, 01 11 21 31 on rank 1, …
#     send, recv      a   .   .   .                 a     a     .     .
#
# Paper: Chan, Heimlich, Purkayastha and van de Geijn, *Collective communication*, 2007.

# %%
import time

import torch
import torch.distributed as dist

from classroom import run_mesh, run_plain

# %% [markdown]
# ## By hand: torch.distributed

# %%


def by_hand(group):
    rank, size = group.rank(), group.size()
    own = torch.full((1,), 10.0 + rank)
    four = torch.arange(4.0) + 10 * rank
    out = {}

    out["broadcast"] = own.clone()
    dist.broadcast(out["broadcast"], group_src=0, group=group)
    summed = own.clone()
    dist.reduce(summed, group_dst=0, group=group)
    out["reduce"] = summed if rank == 0 else torch.zeros(0)
    out["all_reduce"] = own.clone()
    dist.all_reduce(out["all_reduce"], group=group)

    out["scatter"] = torch.empty(1)
    dist.scatter(out["scatter"], list(four.chunk(size)) if rank == 0 else None, group_src=0, group=group)
    parts = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(own, parts, group_dst=0, group=group)
    out["gather"] = torch.cat(parts) if rank == 0 else torch.zeros(0)
    parts = [torch.empty(1) for _ in range(size)]
    dist.all_gather(parts, own, group=group)
    out["all_gather"] = torch.cat(parts)

    out["reduce_scatter"] = torch.empty(1)
    dist.reduce_scatter(out["reduce_scatter"], list(four.chunk(size)), group=group)
    out["all_to_all"] = torch.empty(4)
    dist.all_to_all_single(out["all_to_all"], four, group=group)

    out["send"] = torch.empty(1)
    sending = dist.isend(own, group=group, group_dst=(rank + 1) % size)
    dist.irecv(out["send"], group=group, group_src=(rank - 1) % size).wait()
    sending.wait()
    return out


hand = run_plain(by_hand)
for name in hand[0]:
    print(f"{name:15}", "   ".join(str([int(x) for x in result[name]]) for result in hand))
assert hand[1]["reduce_scatter"].item() == 0 + 10 + 20 + 30 + 4 * 1
assert hand[2]["all_to_all"].tolist() == [2, 12, 22, 32]

# %% [markdown]
# ## With meshwise
#
# A `World` has the same nine along the axes of a mesh. Every call returns a `Work` to wait for.

# %%


def with_meshwise(world):
    rank, axis = world.rank, "rank"
    own = torch.full((1,), 10.0 + rank)
    four = torch.arange(4.0) + 10 * rank
    out = {"broadcast": own.clone(), "all_reduce": own.clone()}
    world.broadcast(out["broadcast"], axes=axis).wait()
    world.all_reduce(out["all_reduce"], axes=axis).wait()
    for name, x, size in (("all_gather", own, 4), ("reduce_scatter", four, 1), ("all_to_all", four, 4)):
        out[name] = torch.empty(size)
        getattr(world, name)(x, into=out[name], axes=axis).wait()
    summed = own.clone()
    world.reduce(summed, axes=axis).wait()
    whole, part = (torch.empty(4) if rank == 0 else None), torch.empty(1)
    world.gather(own, into=whole, axes=axis).wait()
    world.scatter(four if rank == 0 else None, into=part, axes=axis).wait()
    out["reduce"] = summed if rank == 0 else torch.zeros(0)
    out |= {"gather": torch.zeros(0) if whole is None else whole, "scatter": part, "send": torch.empty(1)}
    works = [
        world.send(own, axis=axis, to=(rank + 1) % 4),
        world.recv(out["send"], axis=axis, source=(rank - 1) % 4),
    ]
    for work in works:
        work.wait()
    return out


for plain, ours in zip(hand, run_mesh(with_meshwise), strict=True):
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name
print("all nine give the same numbers")

# %% [markdown]
# ## Timed
#
# The *bus bandwidth* is bytes / seconds, times a factor that makes it comparable between groups of any size: 2 (n-1)/n
# for an all-reduce, (n-1)/n for its two halves. `meshwise bench collectives` measures all of them over many sizes.

# %%


def timed(group):
    x, size = torch.ones(2**18), group.size()
    seconds = []
    for _ in range(5):
        dist.barrier(group=group)
        start = time.perf_counter()
        dist.all_reduce(x, group=group)
        seconds.append(time.perf_counter() - start)
    return 2 * (size - 1) / size * x.nbytes / min(seconds)


print(f"bus bandwidth of an all-reduce of 1 MiB: {min(run_plain(timed)) / 1e9:.2f} GB/s")

# %% [markdown]
# ## Exercise
#
# Write an all-to-all with nothing but all-gather. `answer(mine, all_gather)` gets this rank's row of four numbers, its
# rank as `all_gather.rank`, and a function that returns the rows of all ranks; it returns the column of this rank.

# %%


def answer(mine, all_gather):
    return all_gather(mine)[0]


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    rows = [[f"{i}{j}" for j in range(4)] for i in range(4)]
    for rank in range(4):

        def all_gather(mine, rank=rank):
            assert mine == rows[rank], "give all_gather this rank's own row"
            return rows

        all_gather.rank = rank
        wanted, got = [row[rank] for row in rows], answer(rows[rank], all_gather)
        if got in rows:
            return f"rank {rank} got a whole row, {got}; an all-to-all gives one part from each rank"
        if got != wanted:
            return f"rank {rank} has {got}; it should have {wanted}"
    return ""


print(check(answer) or "right")
