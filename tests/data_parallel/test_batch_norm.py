"""Test that batch norms under replicas train as on one process with the same micro-batches of the global batch.

A micro-batch of the one process consists of the rows that all ranks have in this micro-batch:

    10 rows, dp=2 microbatches=2     rank 0: 0 1 2 | 3 4     rank 1: 5 6 7 | 8 9
    one process                      0 1 2 5 6 7  |  3 4 8 9

In float64, loss, every gradient, every parameter and every running statistic after three steps agree to 1e-9."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grid import Grid
from meshwise.base.mesh import even_split
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.testing import agree, run
from warm_processes import Processes

BOUND = 1e-9
ROWS = {1: (10, 7, 3), 2: (10, 7, 6), 3: (10, 3)}
"""Of each step, by the number of micro-batches: 3 rows are fewer than some plans have ranks, and of 7 rows 4 ranks have
a second micro-batch but for one; of 3 rows no rank has a second."""


class Own(nn.BatchNorm1d):
    """A model's own class, which calls torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


# A bias before a norm has the gradient 0 but for rounding, of which AdamW would make whole steps.
def conv(norm: Callable[[int], nn.Module], dims: int) -> nn.Module:
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    return nn.Sequential(
        layer(2, 5, 2, bias=False), norm(5), nn.Tanh(), nn.Flatten(), nn.Linear(5 * 2**dims, 3)
    ).double()


def flat(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias=False), norm(6), nn.Tanh(), nn.Linear(6, 3, bias=False), norm(3)).double()


class Block(nn.Module):
    def __init__(self, between: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.between = nn.LayerNorm(4, bias=False), nn.Linear(4, 6, bias=False), between
        self.down, self.last = nn.Linear(6, 4, bias=False), last

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(x + self.down(torch.tanh(self.between(self.up(self.norm(x))))))
        return output


MODELS: Mapping[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "1d": ((4,), lambda: flat(nn.BatchNorm1d)),
    "over time": ((2, 3), lambda: conv(nn.BatchNorm1d, 1)),
    "2d": ((2, 3, 3), lambda: conv(nn.BatchNorm2d, 2)),
    "3d": ((2, 3, 3, 3), lambda: conv(nn.BatchNorm3d, 3)),
    "without momentum": ((4,), lambda: flat(lambda width: nn.BatchNorm1d(width, momentum=None))),
    "without statistics kept": ((4,), lambda: flat(lambda width: nn.BatchNorm1d(width, track_running_stats=False))),
    "without scale": ((4,), lambda: flat(lambda width: nn.BatchNorm1d(width, affine=False))),
    "synchronised by torch": ((4,), lambda: flat(nn.SyncBatchNorm)),
    "the model's own": ((4,), lambda: flat(Own)),
    "far from zero": ((4,), lambda: nn.Sequential(Shifted(), flat(nn.BatchNorm1d))),
    "of the input": ((4,), lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()),
}
SPLIT: Mapping[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "of the stream": (
        (4,),
        lambda: nn.Sequential(Block(nn.Identity(), nn.BatchNorm1d(4)), nn.Linear(4, 3)).double(),
    ),
    "of what ranks share out": (
        (4,),
        lambda: nn.Sequential(Block(nn.BatchNorm1d(6), nn.Identity()), nn.Linear(4, 3)).double(),
    ),
    "repeated by the model": ((4,), lambda: nn.Sequential(Checkpointed(), nn.Linear(4, 3)).double()),
}
"""The first two for tp, which splits transformers and MLPs."""


class Checkpointed(nn.Module):
    """Repeats its forward in the backward, so torch updates the running statistics twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(lambda rows: torch.tanh(self.norm(self.up(rows))), x, use_reentrant=False)
        return output


class Shifted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1e3


@functools.cache
def existing(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return {**MODELS, **SPLIT}[kind][1]()


def made(kind: str) -> nn.Module:
    return copy.deepcopy(existing(kind))


def batches(kind: str, plan: Plan) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(rows, *{**MODELS, **SPLIT}[kind][0], generator=generator, dtype=torch.float64)
        for rows in ROWS[plan.microbatches]
    ]


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return (output.sin() + output.square()).sum(), len(output)


def together(batch: Tensor, plan: Plan) -> Iterator[Tensor]:
    """What the ranks run at one time, one micro-batch after the other."""
    shares = [batch[start:stop] for start, stop in even_split(len(batch), plan.dp or 1)]
    cuts = [[share[a:b] for a, b in even_split(len(share), plan.microbatches)] for share in shares]
    for parts in zip(*cuts, strict=True):
        if len(rows := torch.cat(parts)):
            yield rows


def state(model: nn.Module, **more: Any) -> dict[str, Any]:
    buffers = {name: value.double() for name, value in model.named_buffers()}
    return {**more, "buffers": {name: value.clone() for name, value in buffers.items()}}


def on_one_process(kind: str, plan: Plan) -> list[Any]:
    """The loop one would write by hand."""
    model, steps = made(kind), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for batch in batches(kind, plan):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for rows in together(batch, plan):
            part = loss(model(rows), rows)[0] / len(batch)
            part.backward()
            total += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
        steps.append(state(model, loss=total, norm=norm, parameters=parameters))
    model.eval()
    last = batches(kind, plan)[0]
    steps.append({"evaluated": loss(model(last), last)[0] / len(last)})
    return steps


def under(world: World, kind: str, plan: Plan) -> list[Any]:
    options = Options(clip_norm=0.5, example=batches(kind, plan)[0])
    trainer = parallelize(made(kind), plan, loss=loss, world=world, options=options, lr=1e-2, weight_decay=0.0)
    steps = []
    for batch in batches(kind, plan):
        result = trainer.step(batch)
        parameters = {name: value.clone() for name, value in trainer.full_parameters()}
        buffers = {name: value.double() for name, value in trainer._engine.full_buffers()}
        values = {"loss": result.loss, "norm": result.grad_norm, "parameters": parameters}
        steps.append({**values, "buffers": {name: value.clone() for name, value in buffers.items()}})
    steps.append({"evaluated": trainer.evaluate(batches(kind, plan)[:1]).loss})
    trainer.close()
    return steps


def check(kind: str, plan: str, on: Any = "threads") -> None:
    parsed = Plan.parse(plan)
    whole = on_one_process(kind, parsed)
    for steps in run(parsed.mesh().size, under, on=on, args=(kind, parsed)):
        agree(steps, whole, bound=BOUND)


GRID = Grid(
    {"kind": tuple(MODELS), "dp": (2, 1, 4), "zero": (0, 1, 2, 3), "microbatches": (1, 2)},
    cost=lambda cell: 2 if cell["dp"] == 1 else cell["dp"],  # one rank exchanges no statistics
    heavy=lambda cell: cell["dp"] == 1 and cell["kind"] != "1d",
    single=("zero", "dp"),
)


@pytest.mark.grid(GRID)
def test_a_plan_is_one_process_with_the_same_micro_batches(kind: str, dp: int, zero: int, microbatches: int) -> None:
    check(kind, f"dp={dp} zero={zero} microbatches={microbatches}")


@pytest.mark.parametrize(
    "plan", ["pp=2 microbatches=2 partition=params", "dp=2 pp=2 microbatches=2 zero=1 partition=params"]
)
def test_with_other_axes_too(plan: str) -> None:
    check("1d", plan)


@pytest.mark.parametrize("kind", ["2d", "without momentum"])
def test_a_micro_batch_without_rows_counts_as_none(kind: str) -> None:
    check(kind, "dp=4 microbatches=3")


def test_a_forward_that_the_model_repeats_counts_as_in_torch() -> None:
    check("repeated by the model", "dp=2 microbatches=2")


def test_one_value_per_channel_is_refused_as_by_torch() -> None:
    def main(world: World) -> None:
        parallelize(made("1d"), "dp=2", loss=loss, world=world).step(torch.ones(1, 4, dtype=torch.float64))

    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        run(2, main)


@pytest.mark.parametrize("plan", ["tp=2", "dp=2 tp=2 zero=1 microbatches=2"])
@pytest.mark.parametrize("kind", ["of the stream", "of what ranks share out"])
def test_with_features_shared_out_too(kind: str, plan: str) -> None:
    check(kind, plan)


def refused(world: World, kind: str, plan: str) -> None:
    parallelize(made(kind), plan, loss=loss, world=world, lr=1e-2)


@pytest.mark.parametrize(
    "kind, plan, message",
    [
        (
            "of the stream",
            "tp=4 tp_mode=2d",
            r"0\.last: BatchNorm1d .* hidden states, .* split by features.*works: tp_mode=1d",
        ),
        ("of the input", "tp=4 tp_mode=2d", r"0 takes statistics over the batch.*use tp_mode=1d"),
        ("of the stream", "tp=2 sequence_parallel=1", r"0\.last \(BatchN.*part of the tokens.*: sequence_parallel=0"),
    ],
)
def test_what_splits_what_the_statistics_are_of_is_refused_with_what_to_change(
    kind: str, plan: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(Plan.parse(plan).mesh().size, refused, args=(kind, plan))


@pytest.mark.processes
def test_on_real_processes(processes: Processes) -> None:
    check("2d", "dp=4 zero=2 microbatches=2", on=processes)
