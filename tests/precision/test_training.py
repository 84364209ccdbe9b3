"""Training in half precision: what is stored is what the record says, under every plan, and one process agrees."""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.precision.dtype_policy import LossScale, Precision
from meshwise.testing import difference, run

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
STEPS = 2


class Attention(nn.Module):
    """Turns queries and keys by a table in fp32, as rotary positions do, without a thought of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 16).view(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed: Tensor = functional.scaled_dot_product_attention(q * self.table, k * self.table, v)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = Attention()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.drop(self.down(functional.gelu(self.up(self.second(x)))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A tied one, with positions added in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.linspace(-1, 1, 4).view(4, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    assert logits.dtype in (FP32, FP64)  # whatever the model computes in
    return functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def batches(rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    tokens = [torch.randint(16, (rows, 5), generator=draws) for _ in range(STEPS)]
    return [(drawn[:, :-1], drawn[:, 1:]) for drawn in tokens]


def train(world: World, plan: str, build: Callable[[], nn.Module] = Model, **options: Any) -> dict[str, Any]:
    """Two steps: losses, norms, gradients of the last, masters, and what the trainer says of its dtypes."""
    example = batches()[0]
    trainer = parallelize(
        build, plan, loss=loss, world=world, lr=1e-2, options=Options(clip_norm=0.5, example=example, **options)
    )
    before = dict(trainer.precision)
    results = [trainer.step(batch) for batch in batches()]
    outcome = {
        "results": results,
        "before": before,
        "after": dict(trainer.precision),
        "gradients": {name: value.clone() for name, value in trainer.full_gradients()},
        "parameters": {name: value.clone() for name, value in trainer.full_parameters()},
    }
    trainer.close()
    return outcome


def on(plan: str, **options: Any) -> list[dict[str, Any]]:
    return run(Plan.parse(plan).mesh().size, functools.partial(train, **options), args=(plan,))


HALF = {
    "parameters": "bfloat16",
    "compute": "bfloat16",
    "reduction": "bfloat16",
    "accumulation": "float32",
    "master": "float32",
    "optimizer_state": "float32",
    "buffers": "float32",
}
ALONE = (
    "dp=2 zero=1 microbatches=2",
    "dp=2 zero=2 microbatches=2",
    "dp=2 zero=3",
    "tp=2 sequence_parallel=1",
    "pp=2 microbatches=2 schedule=zb-h1 partition=params",
)
COMBINED = (
    "dp=2 tp=2 zero=2",
    "dp=2 pp=2 zero=3 microbatches=2 partition=params",
    "tp=2 pp=2 microbatches=2 partition=params",
)
PLANS = (*ALONE, *COMBINED, "tp=4 tp_mode=2d", "tp=4 tp_mode=2.5d", "tp=8 tp_mode=3d")


def far(one: dict[str, Tensor], other: dict[str, Tensor], *, least: float) -> float:
    """The largest relative difference of tensors of one kind; what is below `least` of the largest is rounding."""
    floor = least * max(float(value.abs().max()) for value in other.values())
    return max(difference(one[name], value, floor=floor).relative for name, value in other.items())


# ---- the numbers -------------------------------------------------------------------------------------------------


def test_bf16_on_one_rank_is_the_loop_that_one_would_write() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))

    torch.manual_seed(0)
    model = build()
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    squares = lambda output, batch: ((output - batch[1]).square().sum(), len(batch[1]))  # noqa: E731

    wide = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for _ in range(STEPS):
        narrow = copy.deepcopy(wide).to(BF16)
        total = squares(narrow(x.to(BF16)).float(), (x, y))[0]
        total.backward()
        for master, parameter in zip(wide.parameters(), narrow.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() / 8
        optimizer.step()

    trainer = parallelize(model, "precision=bf16", loss=squares, lr=1e-2, weight_decay=0.0)
    for _ in range(STEPS):
        result = trainer.step((x, y))
    assert result.loss == float(total.detach()) / 8
    for (name, value), master in zip(trainer.full_parameters(), wide.parameters(), strict=True):
        assert torch.equal(value, master.to(BF16)), name


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """One rank, by record."""
    exact = {"precision": Precision(parameters=FP32, master=FP64)}
    return {"bf16": on("precision=bf16")[0], "fp16": on("precision=fp16", **SMALL)[0], "exact": on("dp=1", **exact)[0]}


SMALL = {"loss_scale": LossScale(8.0)}


RECORDS: dict[str, tuple[dict[str, Any], float, Sequence[str]]] = {
    "bf16": ({}, 2**-8, PLANS),
    "fp16": (SMALL, 2**-11, (*ALONE, *COMBINED)),
    "exact": ({"precision": Precision(parameters=FP32, master=FP64)}, 2**-24, ALONE),
}
"""What is asked for, how the dtype rounds, and under which plans: other products treat dtypes as `1d` does."""


AGREEING = Grid(
    {"record": tuple(RECORDS), "plan": PLANS},
    exists=lambda cell: cell["plan"] in RECORDS[cell["record"]][2],
    heavy=lambda cell: (
        cell["plan"] in ("tp=8 tp_mode=3d", "tp=4 tp_mode=2.5d", "tp=2 pp=2 microbatches=2 partition=params")
        or (cell["record"] == "fp16" and cell["plan"] in COMBINED)
    ),
)


@pytest.mark.grid(AGREEING)
def test_every_plan_agrees_with_one_process_to_what_the_dtype_explains(
    record: str, plan: str, alone: dict[str, dict[str, Any]]
) -> None:
    options, eps, _ = RECORDS[record]
    text = plan if record == "exact" else f"{plan} precision={record}"
    for found in on(text, **options):
        single = alone[record]
        if record == "bf16":
            assert found["before"] == found["after"] == HALF
        assert far(found["gradients"], single["gradients"], least=0.03) < 64 * eps, record
        for result, expected in zip(found["results"], single["results"], strict=True):
            assert result.loss == pytest.approx(expected.loss, rel=8 * eps)
            assert result.grad_norm == pytest.approx(expected.grad_norm, rel=32 * eps)


def test_masters_start_from_values_that_were_never_rounded() -> None:
    model = nn.Linear(4, 4)
    value = model.weight.detach().clone()
    trainer = parallelize(model, "precision=bf16", loss=loss, lr=0.1)
    assert model.weight.dtype == BF16
    masters = [value for group in trainer.optimizer.param_groups for value in group["params"]]
    assert any(torch.equal(master.detach()[:16], value.flatten()) for master in masters if master.numel() >= 16)


# ---- the record --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["dp=2 zero=2 microbatches=2", "dp=2 pp=2 zero=3 microbatches=2 partition=params"])
def test_the_wire_alone_may_be_narrow(plan: str) -> None:
    for found in on(f"{plan} wire=bf16"):
        assert found["before"] == found["after"] == HALF | {"parameters": "float32", "compute": "float32"}


def test_a_given_precision_is_kept() -> None:
    own = Precision(parameters=BF16, compute=BF16, reduction=FP32, accumulation=BF16, master=FP64, buffers=BF16)
    found = on("dp=2 zero=2 microbatches=2", precision=own)[0]
    given = {"reduction": "float32", "accumulation": "bfloat16", "master": "float64", "buffers": "bfloat16"}
    assert found["after"] == HALF | given | {"optimizer_state": "float64"}
    assert all(math.isfinite(result.loss) for result in found["results"])


def test_autocast_alone_is_a_precision() -> None:
    found = on("dp=2", precision=Precision(compute=BF16))[0]
    assert found["after"] == HALF | {"parameters": "float32", "reduction": "float32"}


def test_running_statistics_and_what_goes_with_them_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 2))
    squares = lambda output, batch: (output.square().sum(), len(batch))  # noqa: E731
    trainer = parallelize(model, "precision=bf16", loss=squares, lr=1e-2)
    trainer.step(torch.randn(8, 2, 6, generator=torch.Generator().manual_seed(0)))
    assert trainer.precision["parameters"] == "bfloat16 float32"
    assert model[1].weight.dtype == model[1].running_mean.dtype == FP32
    assert float(model[1].running_mean.abs().sum()) > 0  # type: ignore[operator]


def test_gradients_travel_in_the_dtype_of_the_wire() -> None:
    def counted(world: World, plan: str) -> int:
        trainer = parallelize(Model, plan, loss=loss, world=world, lr=1e-2)
        with world.record() as records:
            trainer.step(batches()[0])
        return sum(record.bytes for record in records if record.kind in ("all_reduce", "reduce_scatter")) - 32

    size = sum(parameter.numel() for parameter in Model().parameters())
    for stage, (plan, width) in itertools.product(range(4), (("precision=bf16", 2), ("wire=fp16", 2), ("", 4))):
        sent = run(2, counted, args=(f"{plan} dp=2 zero={stage}",))[0]
        assert width * size <= sent < width * (size + 5 * 32), (plan, stage)


def test_parameters_are_gathered_and_kept_in_their_own_width() -> None:
    def kept(world: World, plan: str) -> dict[str, int]:
        trainer = parallelize(Model, plan, loss=loss, world=world, lr=1e-2)
        trainer.step(batches()[0])
        return dict(trainer.memory())

    wide, half = (run(2, kept, args=(f"dp=2 zero=3 {plan}",))[0] for plan in ("", "precision=bf16"))
    assert half["gathered_peak"] * 2 == wide["gathered_peak"]
    assert half["parameters"] == wide["parameters"] * 6 // 4
    assert half["optimizer"] == wide["optimizer"]


def test_what_a_stage_has_not_computed_has_the_dtype_of_what_it_has() -> None:
    """Between its pieces the model sees the same dtypes on every stage."""

    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            met.append((x.dtype, self.first.weight.dtype))
            met.append(((x := self.second(x)).dtype, self.second.weight.dtype))
            last: Tensor = self.third(x)
            return last

    met: list[tuple[torch.dtype, torch.dtype]] = []
    rows = torch.zeros(4, 4)

    def main(world: World) -> set[tuple[torch.dtype, torch.dtype]]:
        options = Options(example=rows)
        count = lambda output, batch: (output.square().sum(), batch.numel())  # noqa: E731
        trainer = parallelize(Telling, "pp=3 precision=bf16", loss=count, world=world, options=options)
        met.clear()  # the model was run as it is written, to be cut
        trainer.step(rows)
        return set(met)

    assert run(3, main) == [{(torch.bfloat16, torch.bfloat16)}] * 3
