# %% [markdown]
# # 13. From 1D to 3D: one table
#
# For Y = X · W every scheme is a choice of three sets of axes: X is gathered over A, W is gathered over B, Y is summed
# over C. The backward of a gather is a reduce-scatter, and the reverse.
#
#     scheme             X stored            W stored          gather X   gather W   sum Y over
#     data parallel      T/dp                whole             -          -          -
#     ZeRO-3             T/dp                1/dp              -          dp         -
#     1D, columns        whole               N/tp              -          -          -
#     1D, rows           K/tp                K/tp              -          -          tp
#     2D (SUMMA)         T/row, K/col        K/row, N/col      col        row        -
#     2.5D               T/(row·depth), K/col  K/row, N/col    col        row        - (dW over depth)
#     3D                 T/(i·j), K/l        K/(l·i), N/j      j          i          l, scattered on T
#
# Papers: Xu et al., *Optimus* (2D), arXiv 2104.05343; Wang et al., *Tesseract* (2.5D), arXiv 2105.14500; Bian et al.,
# *Maximizing parallelism in distributed training for huge neural networks* (3D), arXiv 2105.14450.

# %%
import copy

import torch
import torch.distributed as dist

import meshwise as mw
from classroom import run_mesh, run_plain, show
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, alone, count, outcome
from meshwise.view.plan_pictures import mesh_picture

T, K, N = 8, 12, 16
generator = torch.Generator().manual_seed(0)
X, W = torch.randn(T, K, generator=generator).double(), torch.randn(K, N, generator=generator).double()

# %% [markdown]
# ## By hand: one function that reads rows of the table
#
# The mesh has two axes, `row` and `col`, of 2 each; rank = 2 · row + col. A layout names the axis that splits each dim.

# %%

AXES = ("row", "col")


def part(x, layout, rank):
    """Return the part of a rank; layout has an axis or None for each dim of x."""
    index = {"row": rank // 2, "col": rank % 2}
    for dim, axis in enumerate(layout):
        if axis:
            x = x.chunk(2, dim=dim)[index[axis]]
    return x.contiguous()


def along(axis, rank):
    """Return the other rank of this rank's group along an axis."""
    return rank ^ {"row": 2, "col": 1}[axis]


def swap(group, axis, x):
    """Send x to the other rank along an axis, and return its x."""
    other, theirs = along(axis, group.rank()), torch.empty_like(x)
    sending = dist.isend(x, group=group, group_dst=other)
    dist.irecv(theirs, group=group, group_src=other).wait()
    sending.wait()
    return theirs


def gathered(group, axis, x, dim):
    """Return x of both ranks along an axis, joined along dim."""
    theirs = swap(group, axis, x)
    pair = (x, theirs) if group.rank() < along(axis, group.rank()) else (theirs, x)
    return torch.cat(pair, dim=dim)


TABLE = {  # X stored, W stored, (gather X over, dim), (gather W over, dim), sum Y over, Y stored
    "data parallel": (("row", None), (None, None), None, None, None, ("row", None)),
    "ZeRO-3": (("row", None), ("row", None), None, ("row", 0), None, ("row", None)),
    "1D, columns": ((None, None), (None, "col"), None, None, None, (None, "col")),
    "1D, rows": ((None, "col"), ("col", None), None, None, "col", (None, None)),
    "2D": (("row", "col"), ("row", "col"), ("col", 1), ("row", 0), None, ("row", "col")),
}


def by_hand(group, row):
    x_layout, w_layout, gather_x, gather_w, summed, y_layout = row
    x, w = part(X, x_layout, group.rank()), part(W, w_layout, group.rank())
    sent = 0
    if gather_x:
        sent, x = sent + x.numel(), gathered(group, gather_x[0], x, gather_x[1])
    if gather_w:
        sent, w = sent + w.numel(), gathered(group, gather_w[0], w, gather_w[1])
    y = x @ w
    if summed:
        sent, y = sent + y.numel(), y + swap(group, summed, y)
    torch.testing.assert_close(y, part(X @ W, y_layout, group.rank()), rtol=1e-9, atol=1e-12)
    return part(X, x_layout, 0).numel(), part(W, w_layout, 0).numel(), sent


print("scheme          X   W  sent   elements of rank 0, where X has 96 and W 192")
for name, row in TABLE.items():
    x, w, sent = run_plain(lambda group, row=row: by_hand(group, row))[0]
    print(f"{name:13} {x:3} {w:3}   {sent:3}")
print("every row of the table gives its part of X · W")

# %% [markdown]
# ## With meshwise: the same table runs a GPT
#
# Four ranks train a small GPT under 1D, 1D with sequence parallelism, and 2D. The collectives differ, the numbers not.

# %%
shape = GPTConfig(vocabulary=16, context=8, layers=1, heads=4, width=16)
torch.manual_seed(0)
START = GPT(shape).double()
tokens = torch.randint(16, (4, 9), generator=generator)
batches = [(tokens[:, :-1], tokens[:, 1:])] * 2
single = alone(copy.deepcopy(START), loss=next_token_loss, batches=batches, lr=1e-2)


def with_meshwise(world, plan):
    trainer = mw.parallelize(copy.deepcopy(START), plan, loss=next_token_loss, world=world, lr=1e-2)
    with world.record() as records:
        figures = outcome(trainer, batches=batches)
    return figures, count(records)


for plan in ("tp=4", "tp=4 sequence_parallel=1", "tp=4 tp_mode=2d"):
    figures, counts = run_mesh(lambda world, plan=plan: with_meshwise(world, plan))[0]
    agree(figures, single, bound=1e-9)
    kinds = sorted({name.split("[")[0] for name in counts})
    print(f"{plan:26} the numbers of one process; calls {', '.join(kinds)}")

mesh = mw.Plan.parse("tp=8 tp_mode=2.5d tp_depth=2").mesh()
print("\ntp=8 tp_mode=2.5d tp_depth=2\n" + mesh.picture())
show(mesh_picture(mesh, ranks_per_node=4))

# %% [markdown]
# ## Exercise
#
# On a q x q grid a rank stores 1/q² of X and W. Write `answer(T, K, N, q)`: the elements that a rank **receives** in
# the forward of a 2D product.

# %%


def answer(T, K, N, q):
    return T * K / q + K * N / q


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    if (got := answer(8, 12, 16, 1)) != 0:
        return f"a grid of one rank receives nothing; you have {got}: its own part is not received"
    got, wanted = answer(8, 12, 16, 2), 24 + 48
    return "" if got == wanted else f"q=2: {wanted} elements, as `sent` above shows, not {got}"


print(check(answer) or "right")
