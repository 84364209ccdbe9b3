# %% [markdown]
# # 19. Three axes at once
#
# The ranks form a mesh with an axis for each kind of split. A rank has one coordinate along each axis, and talks along
# an axis only to the ranks that differ from it in that coordinate:
#
#     rank = (d · pp + p) · tp + t       here dp is outermost: tp needs the fastest links, dp the slowest will do
#
#     along tp     all-reduces in every layer              inside a node
#     along pp     activations between stages              any link
#     along dp     gradients, once a step                  the slowest link
#
# Paper: Narayanan et al., *Efficient large-scale language model training on GPU clusters*, arXiv 2104.04473.

# %%
import copy

import torch
import torch.distributed as dist
from torch import nn

import meshwise as mw
from classroom import PROCESSES, run_mesh, run_plain, show
from meshwise.testing import agree, alone, outcome
from meshwise.view.plan_pictures import mesh_picture

WIDTH, ROWS = 8, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


torch.manual_seed(0)
START = Stack().double()
x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).double()
whole = copy.deepcopy(START)
(whole(x).square().sum() / x.numel()).backward()

# %% [markdown]
# ## By hand: two stages, each split over two ranks
#
# Lesson 12 inside of lesson 17: rank = 2 · stage + t. Both ranks of a stage have the whole hidden states, so rank
# (0, t) sends to rank (1, t).

# %%


def by_hand(group):
    stage, t = divmod(group.rank(), 2)
    block = START.blocks[stage]
    W, V = block.up.weight.detach().T.chunk(2, dim=1)[t], block.down.weight.detach().T.chunk(2, dim=0)[t]

    def send(tensor, to):
        return dist.isend(tensor.contiguous(), group=group, group_dst=to)

    def receive(source):
        tensor = torch.empty(ROWS, WIDTH).double()
        dist.irecv(tensor, group=group, group_src=source).wait()
        return tensor

    def summed_over_tp(tensor):
        sending = send(tensor, group.rank() ^ 1)
        total = tensor + receive(group.rank() ^ 1)
        sending.wait()
        return total

    X = x if stage == 0 else receive(t)  # along pp
    Y = torch.tanh(X @ W)
    out = X + summed_over_tp(Y @ V)  # along tp
    if stage == 0:
        sending = send(out, 2 + t)
        slope = receive(2 + t)
        sending.wait()
    else:
        slope = 2 * out / x.numel()
    dA = (slope @ V.T) * (1 - Y * Y)
    back = slope + summed_over_tp(dA @ W.T)
    if stage == 1:
        send(back, t).wait()
    return X.T @ dA, Y.T @ slope


hand = run_plain(by_hand)
for stage, block in enumerate(whole.blocks):
    (w0, v0), (w1, v1) = hand[2 * stage : 2 * stage + 2]
    torch.testing.assert_close(torch.cat([w0, w1], dim=1), block.up.weight.grad.T, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.cat([v0, v1], dim=0), block.down.weight.grad.T, rtol=1e-9, atol=1e-12)
print("by hand, pp=2 and tp=2: the gradients of one process, to 1e-9")

# %% [markdown]
# ## With meshwise: any mesh of four ranks
#
# On threads, a mesh of eight ranks with all three axes runs too.

# %%


def loss(out, _):
    return out.square().sum(), out.numel()


RULES = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
single = alone(copy.deepcopy(START), loss=loss, batches=[x, x], lr=1e-2)


def with_meshwise(world, plan):
    rules = RULES if mw.Plan.parse(plan).tp > 1 else None
    options = mw.Options(example=x, cut=mw.CutOptions(at=("blocks.1",)), tensor_rules=rules)
    trainer = mw.parallelize(copy.deepcopy(START), plan, loss=loss, world=world, options=options, lr=1e-2)
    return outcome(trainer, batches=[x, x])


plans = ["pp=2 tp=2 microbatches=2", "dp=2 pp=2 microbatches=2 zero=1", "dp=2 tp=2 zero=3", "dp=4"]
if not PROCESSES:
    plans.append("dp=2 pp=2 tp=2 zero=1 microbatches=2")
for plan in plans:
    size = mw.Plan.parse(plan).mesh().size
    figures = run_mesh(lambda world, plan=plan: with_meshwise(world, plan), size=size)[0]
    agree(figures, single, bound=1e-9)
    print(f"{size} ranks  {plan:38} the numbers of one process")

mesh = mw.Plan.parse("pp=2 dp=2 tp=2").mesh()
print("\n" + mesh.picture())
for axis in mesh.names:
    print(f"groups along {axis}: {mesh.groups([axis])}")
show(mesh_picture(mw.Plan.parse("pp=4 dp=2 tp=2").mesh(), ranks_per_node=8))

# %% [markdown]
# ## Exercise
#
# A mesh of axes with `degrees`, outermost first. Write `answer(rank, degrees, axis)`: the ranks of this rank's group
# along axis number `axis`.

# %%


def answer(rank, degrees, axis):
    return [rank]


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    sizes = (2, 3, 4)
    mesh = mw.Mesh.of(a=2, b=3, c=4)
    for rank in (0, 7, 23):
        for axis, name in enumerate("abc"):
            got, wanted = list(answer(rank, sizes, axis)), list(mesh.group(rank, axes=[name]))
            if len(got) != sizes[axis]:
                return f"a group along axis {axis} of {sizes} has {sizes[axis]} ranks, not {got}"
            if got != wanted:
                return f"rank {rank} along axis {axis} of {sizes}: {wanted}, not {got}"
    return ""


print(check(answer) or "right")
