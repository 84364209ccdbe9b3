"""Recomputation gives the same bits under every plan, and takes the memory of the formula."""

import contextlib
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from grid import Grid
from memory.offloaded_model import the_same
from memory.recomputed_model import LAYERS, Attention, Model, batches, in_modes, loss, on, under
from meshwise.base.tensor_tree import tensors
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.memory.recompute import RecomputedBlock, RecomputeError
from meshwise.model.forward import ForwardReplay
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.pipeline.schedules.named_schedules import SCHEDULES
from meshwise.plan import Plan, PlanError
from meshwise.testing import count, run
from meshwise.verify.verification import verify

EVEN, UNEVEN = 8, 5
"""Rows of a batch: five are shared out unevenly."""

PLANS = (
    "dp=2 zero=3 microbatches=2",
    "dp=2 zero=3 precision=bf16",
    "dp=3 zero=2 microbatches=2",
    "dp=2 tp=2 zero=3",
    "tp=2 sequence_parallel=1",
    "tp=4 tp_mode=2.5d",
    "tp=8 tp_mode=3d",
    "tp=2 pp=2 microbatches=2 schedule=1f1b precision=bf16 partition=params",
    *(
        f"pp=2 microbatches={least} virtual_stages={virtual} schedule={name} partition=params"
        for name, recipe in SCHEDULES.items()
        for least, virtual in [recipe.nearest(2, microbatches=2, virtual_stages=1)]
    ),
)
UNEVENLY = ("tp=4 tp_mode=2d", "dp=2 pp=2 zero=3 microbatches=2 schedule=zb-h1 partition=params")


LIKE_ANOTHER = (
    *("dp=2 tp=2 zero=3", "tp=4 tp_mode=2.5d", "tp=8 tp_mode=3d"),
    *(f"schedule={name} " for name in ("naive", "gpipe", "looped", "zb-h2", "dualpipev")),
    "1f1b precision=bf16",
)
"""Plans whose blocks are repeated as under another one: in their products, and at their places of a schedule."""


@pytest.mark.grid(
    Grid({"plan": PLANS + UNEVENLY}, heavy=lambda cell: any(text in cell["plan"] for text in LIKE_ANOTHER))
)
def test_every_mode_gives_the_same_bits(plan: str) -> None:
    rows = UNEVEN if plan in UNEVENLY else EVEN
    layers = LAYERS if "pp" in plan or "tp" not in plan else 1
    for found in on(plan, in_modes, modes=("none", "full", "selective"), layers=layers, rows=rows):
        for mode in ("full", "selective"):
            the_same(found[mode], found["none"])


@pytest.mark.grid(
    Grid(
        {"plan": ("tp=2", "dp=2 zero=3 microbatches=2", "pp=2 microbatches=2 schedule=zb-h1 partition=params")},
        heavy=lambda cell: cell["plan"] == "tp=2",
    )
)
def test_a_budget_changes_modes_between_steps_and_no_bit(plan: str) -> None:
    def losses(world: World, plan: str) -> tuple[list[tuple[float, float]], list[set[str]]]:
        trainer, modes, found = under(world, plan), [], []
        for batch in batches():
            modes.append(set(trainer.blocks.modes.values()))
            result = trainer.step(batch)
            found.append((result.loss, result.grad_norm))
        return found, modes

    plain = on(plan, losses)
    chosen = on(f"{plan} budget=32K", losses)
    assert [found for found, _ in chosen] == [found for found, _ in plain]
    assert all(modes[0] == modes[1] == {"full"} for _, modes in chosen)
    assert any(modes[2] != {"full"} for _, modes in chosen)


def test_one_process_agrees() -> None:
    plan = "dp=2 zero=3 microbatches=2 recompute=selective"
    report = verify(Model, loss, batches()[:2], plan, options=Options(clip_norm=0.5))
    assert report.ok, str(report)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_block_is_repeated_once_a_micro_batch(schedule: str) -> None:
    """Also by a backward in two parts, which asks for what was saved several times."""

    def runs(world: World, plan: str) -> int:
        options = Options(example=batches()[0], cut=CutOptions(how="blocks"))
        trainer = parallelize(Model, plan, loss=loss, world=world, options=options)
        calls: list[str] = []
        for module in trainer.modules:
            for part in module.modules():
                if isinstance(part, Attention) and any(True for _ in part.parameters()):
                    part.register_forward_hook(lambda *_: calls.append(""))
        trainer.step(batches()[0])
        return len(calls)

    plan = f"pp=2 microbatches=4 schedule={schedule} partition=params"
    assert sum(on(plan, runs)) == 4 * LAYERS
    assert sum(on(f"{plan} recompute=full", runs)) == 2 * 4 * LAYERS


# ---- collectives -------------------------------------------------------------------------------------------------


def called(world: World, plan: str) -> Any:
    trainer = under(world, plan)
    trainer.step(batches()[0])
    with world.record() as records:
        trainer.step(batches()[0])
    return count(records)


def test_a_repeated_forward_gathers_no_parameters_again() -> None:
    """The unit is whole for its backward, in which the forward is repeated: the formula of ZeRO-3 stays."""
    plan = "dp=2 zero=3 microbatches=2"
    plain = on(plan, called)[0]
    for mode in ("full", "selective"):
        on(f"{plan} recompute={mode}", called)[0].check(plain)


def test_kept_products_are_not_reduced_again() -> None:
    """Of each block, two products are summed over tp in the forward: again under full, and not under selective."""
    plain, full, selective = (on(f"tp=2 {more}", called)[0] for more in ("", "recompute=full", "recompute=selective"))
    sums = [counts["all_reduce[tp]"][0] for counts in (plain, full, selective)]
    assert sums[2] == sums[0]
    assert LAYERS <= sums[1] - sums[0] <= 2 * LAYERS


# ---- memory ------------------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """The bytes of all storages that were made inside and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            known = self._seen.get(storage._cdata)
            if storage._cdata not in given and (known is None or known() is None):
                self._seen[storage._cdata] = weakref.ref(storage)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        return result

    def _gone(self, size: int) -> None:
        self.bytes -= size


def saved(model: nn.Module, x: Tensor, *, mode: str) -> int:
    """Return the bytes between a forward and its backward. A first pass makes the blocks trusted."""
    recall = ForwardReplay()
    blocks = [RecomputedBlock(part, name=name, mode=mode, recall=recall) for name, part in model.named_children()]
    model(x).sum().backward()
    with Alive() as alive:
        output = model(x)
        saved_bytes: int = alive.bytes
        output.sum().backward()
    for block in blocks:
        block.close()
    return saved_bytes


class Plain(nn.Module):
    """A block whose activations one can count: norm, up, gelu, down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def test_memory_is_cut_to_the_inputs_and_the_products_that_are_kept() -> None:
    rows, width, layers = 64, 32, 4
    model = nn.Sequential(*(Plain(width) for _ in range(layers)))
    x = torch.randn(rows, width, requires_grad=True)
    unit = rows * width * 4
    output = unit  # of the last block, which the loss has
    statistics = 2 * rows * 4
    found = {mode: saved(model, x, mode=mode) for mode in ("none", "selective", "full")}
    between = (layers - 1) * unit  # the stream between blocks: every block's input but the first, which was there
    assert found["full"] == between + output
    assert found["selective"] == between + output + layers * 4 * unit  # up's output; down's is needed by nobody
    assert found["none"] == between + output + layers * (unit + 4 * unit + 4 * unit + statistics)


class Left(Exception):
    """What ends a forward that goes on elsewhere."""


def test_a_forward_that_is_left_half_way_keeps_what_its_half_needs() -> None:
    """As in a stage of a pipeline that ends inside of a block: nobody needs what came last."""

    class Half(Plain):
        def forward(self, x: Tensor) -> Tensor:
            sent.append(super().forward(x).sum())
            raise Left

    def kept_by(mode: str, *, measures: bool) -> tuple[int, RecomputedBlock]:
        module = Half(width)
        block = RecomputedBlock(module, name="half", mode=mode, recall=ForwardReplay())
        block.measures = measures
        with Alive() as alive, contextlib.suppress(Left):
            module(x)
        kept = alive.bytes
        sent.pop().backward()
        return kept, block

    rows, width = 64, 32
    x, sent = torch.randn(rows, width, requires_grad=True), list[Tensor]()
    product, total = rows * 4 * width * 4, 4
    assert kept_by("full", measures=False)[0] == total
    assert kept_by("selective", measures=False)[0] == total + product
    kept, block = kept_by("full", measures=True)
    assert kept == total
    assert block.cost is not None
    assert block.cost.bytes["selective"] - block.cost.bytes["full"] == product


def most_alive(layers: int, *, width: int, rows: int) -> int:
    """The most bytes while a backward under `full` runs, as seen when gradients arrive."""
    model = nn.Sequential(*(Plain(width) for _ in range(layers)))
    x = torch.randn(rows, width, requires_grad=True)
    recall = ForwardReplay()
    for name, part in model.named_children():
        RecomputedBlock(part, name=name, mode="full", recall=recall)
    seen: list[int] = []
    with Alive() as alive:
        output = model(x)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: seen.append(alive.bytes))
        output.sum().backward()
    return max(seen)


def test_recomputed_values_are_freed_during_the_backward() -> None:
    """A layer more costs its input and its gradients, and not what was computed again."""
    width, rows = 32, 256
    grows = (most_alive(6, width=width, rows=rows) - most_alive(2, width=width, rows=rows)) / 4
    gradients = sum(parameter.nbytes for parameter in Plain(width).parameters())
    assert grows <= rows * width * 4 + gradients


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_block_that_saves_other_tensors_is_an_error() -> None:
    class Fickle(nn.Module):
        def __init__(self, change: Callable[[Tensor, int], Tensor]) -> None:
            super().__init__()
            self.weight, self.calls, self.change = nn.Parameter(torch.ones(4)), 0, change

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.change(x * self.weight, self.calls)

    def fails(change: Callable[[Tensor, int], Tensor], message: str) -> None:
        module = Fickle(change)
        RecomputedBlock(module, name="odd", mode="full", recall=ForwardReplay())
        with pytest.raises(RecomputeError, match=f"odd saved {message} when its forward was repeated"):
            module(torch.ones(2, 4, requires_grad=True)).sum().backward()

    fails(lambda x, calls: x.exp() if calls == 1 else x, "fewer tensors")
    fails(lambda x, calls: x[: 3 - calls].exp(), r"a tensor of .*\[1, 4\].* instead of .*\[2, 4\].*cpu.*")


@pytest.mark.parametrize("measures", [False, True])
def test_a_block_that_writes_to_its_input_is_an_error(*, measures: bool) -> None:
    class Writing(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5))

    module, x = Writing(4), torch.ones(2, 4, requires_grad=True)
    block = RecomputedBlock(module, name="odd", mode="full", recall=ForwardReplay())
    block.measures = measures
    with pytest.raises(RecomputeError, match="an input of odd has been written to in place"):
        module(x + 1).sum().backward()


@pytest.mark.parametrize("plan", ["dp=1", "dp=2 microbatches=2", "pp=2 microbatches=2 schedule=zb-h1 partition=params"])
def test_running_statistics_are_taken_once(plan: str) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.norm(self.linear(x)))

    def buffers(world: World, mode: str) -> dict[str, Tensor]:
        squares = lambda output, batch: (output.square().sum(), len(batch))  # noqa: E731
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        options = Options(recomputed=("0", "1"), example=x)
        build = lambda: nn.Sequential(Normed(), Normed())  # noqa: E731
        trainer = parallelize(build, f"{plan}{mode}", loss=squares, world=world, options=options, lr=1e-2)
        trainer.step(x)
        return {name: value.clone() for name, value in trainer.full_buffers()}

    ranks = Plan.parse(plan).mesh().size
    expected = run(ranks, buffers, args=("",))[0]
    assert int(expected["0.norm.num_batches_tracked"]) == Plan.parse(plan).microbatches
    for mode in ("full", "selective"):
        for found in run(ranks, buffers, args=(f" recompute={mode}",)):
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_block_that_writes_to_a_buffer_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self, *, anew: bool) -> None:
            super().__init__()
            self.anew = anew
            self.calls: Tensor
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1 if self.anew else self.calls.add_(1)
            return x * self.calls

    for anew in (False, True):
        module = nn.Sequential(Counting(anew=anew))
        RecomputedBlock(module, name="odd", mode="full", recall=ForwardReplay())
        with pytest.raises(RecomputeError, match=r"odd writes to its buffer '0\.calls' in its forward"):
            module(torch.ones(2, requires_grad=True))


def test_a_model_without_blocks_is_an_error_that_says_how_to_name_some() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    squares = lambda output, batch: (output.square().sum(), len(batch))  # noqa: E731
    with pytest.raises(PlanError, match=r"Options\(recomputed="):
        parallelize(build, "recompute=full", loss=squares)
    trainer = parallelize(build, "recompute=full", loss=squares, lr=0.1, options=Options(recomputed=("0", "2")))
    assert trainer.blocks.modes == {"0": "full", "2": "full"}
    trainer.step(torch.ones(2, 4))
    trainer.close()
    assert all("forward" not in vars(part) for part in trainer.model.modules())


def test_evaluation_repeats_nothing() -> None:
    trainer = parallelize(Model, "recompute=full", loss=loss, lr=1e-2)
    plain = parallelize(Model, "dp=1", loss=loss, lr=1e-2)
    assert trainer.evaluate(iter(batches())) == plain.evaluate(iter(batches()))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_backward_twice_through_one_graph(mode: str) -> None:
    model, x = Plain(8), torch.randn(3, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), [x])
    RecomputedBlock(model, name="plain", mode=mode, recall=ForwardReplay())
    output = model(x).sum()
    for retain in (True, False):
        (found,) = torch.autograd.grad(output, [x], retain_graph=retain)
        assert torch.equal(found, expected)


class Asks(nn.Module):
    """Blocks that ask whether what they are given is one tensor, as torch's attention does of query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, x, x)[0]
        return x


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_tensor_passed_twice_stays_one_tensor_when_a_block_is_repeated(mode: str) -> None:
    batches = [torch.randn(4, 3, 8)]
    report = verify(Asks, lambda y, x: (y.square().sum(), len(x)), batches, f"dp=1 recompute={mode}")
    assert report.ok, str(report)


class Selective(nn.Module):
    """Block of a user that keeps its products by torch's own selective checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        y: Tensor = checkpoint(lambda x: self.down(self.up(x).tanh()), x, use_reentrant=False, context_fn=kept)
        return x + y


def test_selective_checkpointing_of_the_user_inside_a_recomputed_block_gives_no_warning() -> None:
    found = []
    for plan in ("dp=1", "dp=1 recompute=full"):
        torch.manual_seed(0)
        model = nn.Sequential(Selective(), Selective())
        trainer = parallelize(model, plan, loss=lambda y, _: (y.square().sum(), len(y)), lr=0.1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found.append([trainer.step(torch.ones(2, 4)).loss for _ in range(2)])
        assert [str(each.message) for each in told] == []
    assert found[0] == found[1]
