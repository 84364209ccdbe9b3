"""Test codecs on the wire: each keeps its contract over ranks, ZeRO stages and axes, and sends the bytes it promises.

replay       the algorithm in plain lines over R replicas in one process gives every parameter to 1e-9
degenerate   a setting that loses nothing gives the numbers of one process
invariant    applied sums + errors of all ranks = sums of the true gradients, also across a change of plan"""

import functools
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_parallel.test_agreement import BOUND, TRAINING, Case, batches
from grid import Grid, ranks_of
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.gradient_reduction import CODECS
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan, PlanError
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, count, run

WIRES = ("int8", "int4", "fp8", "1bit", "qsgd:4", "powersgd:1", "topk:0.1")
LR = 0.1
SGD = torch.optim.SGD
EQUAL = Options(parameter_options=lambda _name, _parameter: {})


# ---- replay: one layer of one bucket, SGD ------------------------------------------------------------------------


def layer() -> nn.Module:
    """A matrix and a vector of uneven sizes, in one bucket."""
    torch.manual_seed(3)
    made = nn.Linear(19, 37).double()
    made.bias.requires_grad_(True)
    return made


def square_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), len(output)


def rows(step: int, ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return draw(2 * ranks, 19), draw(2 * ranks, 37)


def flat_gradient(module: nn.Module, x: Tensor, y: Tensor, *, size: int) -> Tensor:
    """The summed loss's gradient, weight then bias, in a buffer of `size` elements."""
    module.zero_grad()
    square_loss(module(x), (x, y))[0].backward()
    flat = torch.cat([p.grad.view(-1) for p in module.parameters() if p.grad is not None])
    return nn.functional.pad(flat, (0, size - len(flat)))


def replay(wire: str, ranks: int, *, zero: int, feedback: bool, steps: int) -> dict[str, Tensor]:
    """Train by the published algorithm, in one process."""
    module, name, _, number = layer(), *wire.partition(":")
    used = sum(p.numel() for p in module.parameters())
    size = -(-used // (16 * ranks)) * 16 * ranks
    shard = size // ranks
    error, owners = torch.zeros(ranks, size, dtype=torch.float64), torch.zeros(ranks, shard, dtype=torch.float64)
    rank = int(number or 0) if name == "powersgd" else 0
    factor = torch.randn(
        19 * rank, generator=torch.Generator().manual_seed(zlib.crc32(b"weight")), dtype=torch.float64
    ).view(19, rank)

    def through(values: Tensor) -> Tensor:
        codec = CODECS[name](float(number or 0))
        return codec.decode(codec.encode(values), elements=values.shape[-1], dtype=values.dtype)

    for step in range(steps):
        x, y = (part.chunk(ranks) for part in rows(step, ranks))
        wanted = torch.stack([flat_gradient(module, *own, size=size) for own in zip(x, y, strict=True)]) + error
        if rank:
            matrices = wanted[:, : 37 * 19].view(ranks, 37, 19)
            left = torch.linalg.qr((matrices @ factor).sum(0)).Q
            own = matrices.mT @ left
            factor, sent = own.sum(0), wanted.clone()
            sent[:, : 37 * 19] = (left @ own.mT).reshape(ranks, -1)
            total = sent.sum(0)
        else:
            sent = torch.stack([through(each.view(ranks, -1)).view(-1) for each in wanted])
            sent[:, used:] = 0
            total = sent.sum(0)
            if zero == 0:
                due = total.view(ranks, -1) + owners
                total = torch.cat([through(each.view(1, -1)).view(-1) for each in due])
                due.view(-1)[used:] = total[used:] = 0
                owners = (due - total.view(ranks, -1)) * feedback
        error = (wanted - sent) * feedback
        with torch.no_grad():
            for p, part in zip(module.parameters(), total.split([37 * 19, 37, size - used])[:2], strict=True):
                p.sub_(LR / (2 * ranks) * part.view_as(p))
    return {name: p.detach() for name, p in module.named_parameters()}


REPLAYS = Grid(
    {"wire": WIRES, "ranks": (2, 3, 4), "zero": (0, 1, 2, 3), "feedback": (0, 1)},
    cost=lambda cell: cell["ranks"],
    single=("ranks",),
)


@pytest.mark.grid(REPLAYS)
def test_training_equals_the_algorithm_in_plain_lines(wire: str, ranks: int, zero: int, feedback: int) -> None:
    def main(world: World) -> dict[str, Tensor]:
        plan = f"dp={ranks} zero={zero} wire={wire} feedback={feedback}"
        trainer = parallelize(layer(), plan, loss=square_loss, world=world, options=EQUAL, optimizer=SGD, lr=LR)
        for step in range(4):
            trainer.step(rows(step, ranks))
        return {name: value.clone() for name, value in trainer.full_parameters()}

    expected = replay(wire, ranks, zero=zero, feedback=bool(feedback), steps=4)
    for found in run(ranks, main):
        agree(found, expected, bound=BOUND)


# ---- degenerate points and other axes ------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["dp=3 zero=0 wire=topk:1", "dp=3 zero=3 wire=topk:1 microbatches=3", "wire=1bit"])
def test_what_loses_nothing_is_one_process(plan: str) -> None:
    def main(world: World) -> Any:
        return outcome(parallelize(Case().model(), plan, world=world, **TRAINING), batches=batches())

    whole = alone(Case().model(), batches=batches(), **TRAINING)
    for steps in run(Plan.parse(plan).mesh().size, main):
        agree(steps, whole, bound=BOUND)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_gradient_of_no_more_rank_than_powersgd_is_exact(zero: int) -> None:
    """Each of 2 ranks has one row, so the gradient of a linear layer's matrix is of rank 2."""

    def main(world: World, plan: str) -> dict[str, Tensor]:
        trainer = parallelize(layer(), plan, loss=square_loss, world=world, optimizer=SGD, lr=LR)
        for step in range(3):
            trainer.step(tuple(part[:2] for part in rows(step, 2)))
        return {name: value.clone() for name, value in trainer.full_parameters()}

    whole = run(1, main, args=("dp=1",))[0]
    for found in run(2, main, args=(f"dp=2 zero={zero} wire=powersgd:2 feedback=0",)):
        agree(found, whole, bound=BOUND)


# ---- invariant: applied sums + errors = sums of the true gradients --------------------------------------------------


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=16, context=4, layers=2, heads=2, width=8, mlp_ratio=2, bias=True)).double()


def tokens(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(16, (12, 5), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def made(world: World, plan: str, lr: float = 0.05) -> Trainer:
    options = Options(example=tokens(0))
    return parallelize(gpt, plan, loss=next_token_loss, world=world, options=options, optimizer=SGD, lr=lr)


def buckets(trainer: Trainer) -> list[Bucket]:
    return [bucket for unit in trainer.units for bucket in unit.buckets if bucket.trainable]


def errors(trainer: Trainer) -> dict[str, Tensor]:
    """The errors of all ranks, added up, of the summed gradient; of this rank's stages and its part under tp."""
    return {
        piece.row.name: whole[piece.start : piece.stop].clone()
        for bucket in buckets(trainer)
        for whole in [bucket.gathered_from(bucket.summed_state("error"))]
        for piece in bucket.place.pieces
    }


def applied(trainer: Trainer) -> dict[str, Tensor]:
    """The mean gradient that the step applied, as `errors` has it."""
    return {
        piece.row.name: whole[piece.start : piece.stop].clone()
        for bucket in buckets(trainer)
        for whole in [bucket.gathered_from(bucket.owned_gradient())]
        for piece in bucket.place.pieces
    }


COUNT = 12 * 4
SHAPES = ("dp=2", "dp=3", "dp=4", "dp=2 tp=2", "dp=2 pp=2 microbatches=2", "dp=1 cp=2")
INVARIANTS = Grid(
    {"wire": WIRES, "shape": SHAPES, "zero": (0, 1, 2, 3)},
    heavy=lambda cell: cell["shape"] in ("dp=3", "dp=4"),  # the replays have more ranks
    cost=lambda cell: ranks_of(cell["shape"]),
    strength=1,
)


@pytest.mark.grid(INVARIANTS)
def test_what_is_not_applied_is_in_the_errors(wire: str, shape: str, zero: int, tmp_path: Path) -> None:
    """With lr=0 the parameters stay, so exact training gives the true gradients. A load lies between the steps."""

    def main(world: World) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        found = []
        trainer = made(world, f"{shape} zero={zero} wire={wire}", lr=0.0)
        for step in range(4):
            trainer.step(tokens(step))
            if step == 1:
                trainer.save(tmp_path / "saved")
                trainer = made(world, f"{shape} zero={zero} wire={wire}", lr=0.0)
                trainer.load(tmp_path / "saved")
            else:
                found.append((applied(trainer), errors(trainer)))
        return found

    ranks = Plan.parse(shape).mesh().size

    def last(world: World) -> dict[str, Tensor]:
        trainer = made(world, f"{shape} zero={zero}", lr=0.0)
        trainer.step(tokens(3))
        return applied(trainer)

    exact, coded = run(ranks, last), run(ranks, main)
    for theirs, ours in zip(exact, coded, strict=True):
        before = ours[1][1]  # the errors after the step that follows the load
        for name, true in theirs.items():
            got, error = ours[2][0][name], (ours[2][1][name] - before[name]) / COUNT
            torch.testing.assert_close(got + error, true, rtol=1e-9, atol=1e-12)
            assert wire == "powersgd:1" or not torch.allclose(got, true, rtol=1e-3)


RESHARDED = (
    ("dp=2", "dp=3 zero=1"),
    ("dp=3 zero=2", "dp=2"),
    ("dp=2 zero=3", "dp=4 zero=3"),
    ("dp=2x2 zero=2", "dp=3"),
    ("dp=2 zero=1", "dp=2x2 zero=3"),
    ("dp=4 hpz=2 zero=3", "dp=2x4 hpz=2 zero=3"),
)


@pytest.mark.grid(Grid({"plans": RESHARDED}, heavy=lambda cell: cell["plans"] in RESHARDED[2:5]))
def test_errors_are_saved_and_resharded(plans: tuple[str, str], tmp_path: Path) -> None:
    before, after = plans

    def first(world: World) -> dict[str, Tensor]:
        trainer = made(world, f"{before} wire=1bit")
        for step in range(2):
            trainer.step(tokens(step))
        trainer.save(tmp_path / "saved")
        return errors(trainer)

    def second(world: World) -> dict[str, Tensor]:
        trainer = made(world, f"{after} wire=1bit")
        trainer.load(tmp_path / "saved")
        return errors(trainer)

    kept = run(Plan.parse(before).mesh().size, first)[0]
    for found in run(Plan.parse(after).mesh().size, second):
        agree(found, kept, bound=BOUND)
        assert all(float(error.abs().max()) > 0 for error in found.values())


def test_a_step_that_is_not_finite_leaves_finite_errors() -> None:
    def main(world: World) -> tuple[bool, float]:
        options = Options(nonfinite="skip:1")
        trainer = parallelize(layer(), "dp=2 wire=1bit", loss=square_loss, world=world, options=options, lr=LR)
        x, y = rows(0, 2)
        skipped = trainer.step((x * float("inf"), y)).skipped
        return bool(skipped), trainer.step((x, y)).loss

    for skipped, loss in run(2, main):
        assert skipped
        assert loss < float("inf")


@pytest.mark.parametrize("zero", [0, 2])
def test_powersgd_keeps_its_factors_over_a_step_that_is_not_finite(zero: int) -> None:
    plan = f"dp=2 zero={zero} wire=powersgd:1 feedback=0"

    def main(world: World, broken: int | None) -> tuple[list[bool], dict[str, Tensor]]:
        options = Options(nonfinite="skip:1")
        trainer = parallelize(layer, plan, loss=square_loss, world=world, options=options, optimizer=SGD, lr=LR)
        skipped = []
        for step in range(4):
            x, y = rows(step, 2)
            if step == broken:  # only rank 0 has the row
                skipped.append(trainer.step((x.index_fill(0, torch.tensor([0]), float("inf")), y)).skipped)
            skipped.append(trainer.step((x, y)).skipped)
        return skipped, {name: value.clone() for name, value in trainer.full_parameters()}

    _, expected = run(2, main, args=(None,))[0]
    for skipped, found in run(2, main, args=(2,)):
        assert skipped == [False, False, True, False, False]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_errors_count_as_memory() -> None:
    def main(world: World) -> tuple[int, int]:
        trainer = parallelize(layer(), "dp=2 wire=1bit", loss=square_loss, world=world, lr=LR)
        return trainer.memory()["reduction"], sum(bucket.place.size for bucket in buckets(trainer))

    for memory, size in run(2, main):
        assert memory == (size + size // 2) * 8


# ---- bytes -------------------------------------------------------------------------------------------------------


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 128))


@pytest.mark.parametrize(
    "wire, least", {"1bit": 28.0, "int8": 3.9, "fp8": 3.9, "int4": 7.7, "qsgd:4": 7.7, "topk:0.01": 49.0}.items()
)
def test_packed_bytes_travel(wire: str, least: float) -> None:
    """An all-reduce of P bytes sends as much as an all-to-all and an all-gather of P bytes each."""

    def main(world: World, wire: str) -> dict[str, tuple[int, int]]:
        trainer = parallelize(wide(), f"dp=4 wire={wire}", loss=square_loss, world=world, optimizer=SGD, lr=LR)
        with world.record() as records:
            trainer.step((torch.ones(4, 256), torch.ones(4, 128)))
        return dict(count(records))

    plain = run(4, main, args=("fp32",))[0]["all_reduce[dp]"][1] - 32
    found = run(4, main, args=(wire,))[0]
    sent = found["all_to_all[dp]"][1], found["all_gather[dp]"][1]
    assert sent[0] == sent[1]
    assert plain / sent[0] >= least
    assert found["all_reduce[dp]"][1] == 32


def test_powersgd_sends_two_factors_of_each_matrix_and_the_vectors() -> None:
    def main(world: World) -> dict[str, tuple[int, int]]:
        trainer = parallelize(wide(), "dp=4 wire=powersgd:4", loss=square_loss, world=world, optimizer=SGD, lr=LR)
        with world.record() as records:
            trainer.step((torch.ones(4, 256), torch.ones(4, 128)))
        return dict(count(records))

    factors, vectors = 4 * (512 + 256 + 128 + 512), 512 + 128
    assert run(4, main)[0]["all_reduce[dp]"][1] == (factors + vectors) * 4 + 32


def test_a_tied_weight_in_two_stages_is_refused_where_its_copies_would_differ() -> None:
    tokens = torch.randint(16, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1], tokens[:, 1:]

    def copies(world: World, wire: str) -> list[Tensor]:
        shape = GPTConfig(vocabulary=16, context=8, layers=2, heads=2, width=8, tied=True)
        plan, options = f"pp=2 dp=2 microbatches=2 partition=params wire={wire}", Options(example=batch)
        trainer = parallelize(lambda: GPT(shape), plan, loss=next_token_loss, world=world, options=options, lr=1e-2)
        for _ in range(4):
            trainer.step(batch)
        parameters = [each for module in trainer.modules for each in module.parameters() if each.shape == (16, 8)]
        return [parameter.detach().clone() for parameter in parameters]

    with pytest.raises(
        PlanError, match=r"wire=int8 would let copies of embedding\.weight in two stages differ; use pp=1"
    ):
        run(4, copies, args=("int8",))
    first, *others = [copy for held in run(4, copies, args=("powersgd:2",)) for copy in held]
    assert others
    assert all(torch.equal(first, other) for other in others)
