"""Test replicas that send their changes through a codec (`sync=diloco wire=int8`), and keep what it loses.

replay      DiLoCo, SlowMo and EASGD with the codec, in plain lines over R replicas in one process, to 1e-12
invariant   sent changes + errors of all replicas = weighted sums of the true changes and the errors before
anchors     equal bits on every replica after every round"""

import functools
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid, ranks_of
from meshwise.comm.api.flight_recorder import bus_factor
from meshwise.comm.api.world import World
from meshwise.data_parallel.gradient_reduction import CODECS, CodecReduction
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan, PlanError
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import run
from meshwise.verify import verify
from sync.test_replay import batch, made

WIRES = ("int8", "fp8", "int4", "qsgd:4", "1bit", "topk:0.1")
WIDE = (19, 37)
USED, LR = 37 * 19 + 37, 0.05
EVERY = 2
SCHEMES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "diloco": ("diloco", {"outer_lr": 0.5}),
    "streaming": ("diloco", {"outer_lr": 0.5, "delay": 1, "blend": 0.5}),
    "local": ("local", {"state": "keep"}),
    "slowmo": ("slowmo", {}),
    "easgd": ("easgd", {}),
}


def layer() -> nn.Module:
    """A matrix and a vector of uneven sizes, in one bucket."""
    torch.manual_seed(3)
    return nn.Linear(*WIDE).double()


def square_loss(output: Tensor, given: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (output - given[1]).square().mean(1).sum(), len(output)


def rows(step: int, ranks: int) -> tuple[Tensor, Tensor]:
    """A batch with one row more than the replicas share evenly, so they weigh differently."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return draw(2 * ranks + 1, 19), draw(2 * ranks + 1, 37)


def trained(world: World, plan: str, settings: dict[str, Any]) -> Trainer:
    options = Options(parameter_options=lambda _name, _parameter: {}, sync=settings)
    return parallelize(
        layer(), plan, loss=square_loss, world=world, options=options, optimizer=torch.optim.SGD, lr=LR, momentum=0.5
    )


def through(wire: str, values: Tensor) -> Tensor:
    """Return rows of values after the codec."""
    name, _, number = wire.partition(":")
    codec = CODECS[name](float(number or 0))
    return codec.decode(codec.encode(values), elements=values.shape[-1], dtype=values.dtype)


def replay(wire: str, ranks: int, settings: Mapping[str, Any], *, feedback: int, steps: int) -> list[Tensor]:
    """Train by the algorithm in one process; return the flat parameters of each replica, and the agreed ones."""
    size = -(-USED // (16 * ranks)) * 16 * ranks
    modules = [layer() for _ in range(ranks)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=LR, momentum=0.5) for module in modules]
    flat = lambda module: torch.cat([p.detach().view(-1) for p in module.parameters()])  # noqa: E731
    anchor, outer = flat(modules[0]), torch.zeros(USED, dtype=torch.float64)
    errors, change = torch.zeros(ranks, size, dtype=torch.float64), torch.zeros(USED, dtype=torch.float64)
    counts = [0] * ranks
    delay, unit = settings["delay"], LR if settings["scaled_by_lr"] else 1.0
    for step in range(1, steps + 1):
        parts = zip(*(x.tensor_split(ranks) for x in rows(step - 1, ranks)), strict=True)
        for number, (module, optimizer, own) in enumerate(zip(modules, optimizers, parts, strict=True)):
            optimizer.zero_grad()
            total, here = square_loss(module(own[0]), own)
            (total / here).backward()
            optimizer.step()
            counts[number] += here
        if (step + delay) % EVERY == 0:
            wanted = errors.clone()
            for number, module in enumerate(modules):
                wanted[number, :USED] += (anchor - flat(module)) * counts[number]
            sent = through(wire, wanted.view(ranks * ranks, -1)).view(ranks, size)
            errors = (wanted - sent) * feedback
            sums = sent.sum(0).view(ranks, -1)
            shared = through(wire, sums)
            for owner in range(ranks):
                errors[owner].view(ranks, -1)[owner] += (sums - shared)[owner] * feedback
            errors[:, USED:] = 0
            change, counts = shared.view(-1)[:USED] / sum(counts), [0] * ranks
        if step % EVERY == 0 and step > delay:
            outer = settings["outer_momentum"] * outer + change / unit
            move = change / unit + settings["outer_momentum"] * outer if settings["nesterov"] else outer
            before, anchor = anchor, anchor - settings["outer_lr"] * unit * move
            towards = before if settings["elastic"] else anchor
            with torch.no_grad():
                for module in modules:
                    new = (1 - settings["blend"]) * towards + settings["blend"] * flat(module)
                    for p, value in zip(module.parameters(), new.split([37 * 19, 37]), strict=True):
                        p.copy_(value.view_as(p))
    return [*map(flat, modules), anchor]


def agreed(trainer: Trainer) -> Tensor:
    """The agreed parameters, in the order of `buckets`."""
    found = [bucket for unit in trainer.units for bucket in unit.buckets if bucket.trainable]
    return torch.cat([bucket.reduction_state["agreed"] for bucket in found])


REPLAYS = Grid(
    {"scheme": tuple(SCHEMES), "wire": WIRES, "ranks": (2, 3, 4), "feedback": (0, 1)},
    cost=lambda cell: cell["ranks"],
    single=("ranks", "wire"),
)


@pytest.mark.grid(REPLAYS)
def test_a_plan_is_the_algorithm_with_the_codec(scheme: str, wire: str, ranks: int, feedback: int) -> None:
    name, settings = SCHEMES[scheme]

    def main(world: World) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        trainer = trained(world, f"dp={ranks} sync={name} every={EVERY} wire={wire} feedback={feedback}", settings)
        for step in range(7):
            trainer.step(rows(step, ranks))
        own = torch.cat([p.detach().view(-1) for p in trainer.model.parameters()])
        assert trainer.scheme is not None
        return own, agreed(trainer), vars(trainer.scheme)

    found = run(ranks, main)
    *expected, anchor = replay(wire, ranks, found[0][2], feedback=feedback, steps=7)
    for (own, ours, _), theirs in zip(found, expected, strict=True):
        assert torch.allclose(own, theirs, rtol=0, atol=1e-12)
        assert torch.allclose(ours[:USED], anchor, rtol=0, atol=1e-12)
        assert torch.equal(ours, found[0][1])
        assert not ours[USED:].any()


SHAPES = ("dp=2", "dp=3", "dp=2 tp=2", "dp=2 pp=2 microbatches=2", "dp=2 cp=2 context=ring")
SETTINGS = {"fragments": 2, "delay": 1, "blend": 0.5}


def untied() -> nn.Module:
    return GPT(GPTConfig(vocabulary=16, context=8, layers=2, heads=2, width=8, mlp_ratio=2)).double()


def gpt(world: World, plan: str, settings: dict[str, Any]) -> Trainer:
    options = Options(example=batch(0), sync=settings)
    return parallelize(untied, plan, world=world, loss=next_token_loss, options=options, lr=1e-2)


@pytest.mark.grid(
    Grid(
        {"wire": WIRES, "shape": SHAPES, "settings": (0, 1)},
        cost=lambda cell: ranks_of(cell["shape"]) ** 2,
        strength=1,
        heavy=lambda cell: "pp" in cell["shape"] or "cp" in cell["shape"],  # the next test has them
    )
)
def test_what_is_not_sent_is_in_the_errors(wire: str, shape: str, settings: int) -> None:
    """`verify` compares the scheme without the codec with its replay, and checks the sum of changes and errors."""
    batches = [batch(number) for number in range(5)]
    options = Options(sync=SETTINGS if settings else {})
    report = verify(
        untied, next_token_loss, batches, f"{shape} sync=diloco every=3 wire={wire}", lr=1e-2, options=options
    )
    assert report.ok, str(report)
    assert "the codec's change and errors add up to the true change" in str(report)


def test_a_lost_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CodecReduction, "_packed_and_lost", lambda self, parts: (self.codec.encode(parts), parts * 0))
    report = verify(untied, next_token_loss, [batch(0)], "dp=2 sync=local wire=int8", lr=1e-2)
    assert "the sum of the codec's change and errors" in report.verdict + str(report.first)


@pytest.mark.grid(
    Grid(
        {"wire": ("int8", "int4"), "shape": SHAPES, "settings": (0, 1)},
        strength=1,
        heavy=lambda cell: "tp" in cell["shape"] or cell["shape"] == "dp=3",  # the test above has them
    )
)
def test_anchors_have_equal_bits_and_a_round_resumes(wire: str, shape: str, settings: int, tmp_path: Path) -> None:
    plan = f"{shape} sync=diloco every=3 wire={wire}"

    def digest(trainer: Trainer) -> None:
        bits = agreed(trainer).view(torch.int64)
        everyone = trainer.world.exchange(bits, axes=trainer.plan.sync_axes)
        assert all(torch.equal(bits, other) for other in everyone)

    def main(world: World) -> list[dict[str, Tensor]]:
        one = gpt(world, plan, SETTINGS if settings else {})
        for number in range(5):
            one.step(batch(number))
            digest(one)
        one.save(tmp_path / "half")
        other = gpt(world, plan, SETTINGS if settings else {})
        other.load(tmp_path / "half")
        for number in range(5, 9):
            for trainer in (one, other):
                trainer.step(batch(number))
                digest(trainer)
        found = [{name: value.clone() for name, value in trainer.full_parameters()} for trainer in (one, other)]
        one.load(tmp_path / "half")  # with an exchange in flight
        for number in range(5, 9):
            one.step(batch(number))
        return [*found, {name: value.clone() for name, value in one.full_parameters()}]

    for ours, *others in run(Plan.parse(shape).mesh().size, main):
        for resumed, (name, value) in itertools.product(others, ours.items()):
            assert torch.equal(value, resumed[name]), name


def summed_errors(trainer: Trainer) -> Tensor:
    found = [bucket for unit in trainer.units for bucket in unit.buckets if bucket.trainable]
    errors = torch.cat([bucket.reduction_state["outer_error"] for bucket in found])
    trainer.world.all_reduce(errors, axes="dp").wait()
    return errors


def test_errors_add_up_to_the_same_on_another_number_of_replicas(tmp_path: Path) -> None:
    def main(world: World, loads: bool) -> Tensor:
        trainer = gpt(world, f"dp={world.size} sync=diloco every=2 wire=int4", {})
        if loads:
            trainer.load(tmp_path / "saved")
        else:
            for number in range(3):
                trainer.step(batch(number))
            trainer.save(tmp_path / "saved")
        return summed_errors(trainer)

    expected = run(3, main, args=(False,))[0]
    assert expected.abs().max() > 0
    for ranks in (2, 3, 4):
        assert torch.allclose(run(ranks, main, args=(True,))[0], expected, rtol=1e-12, atol=0)


def test_a_codec_continues_a_round_without_one(tmp_path: Path) -> None:
    def main(world: World, before: str, after: str) -> tuple[Tensor, Tensor]:
        trainer = gpt(world, f"dp=2 sync=diloco every=4 wire={before}", {})
        for number in range(6):
            trainer.step(batch(number))
        trainer.save(tmp_path / after)
        other = gpt(world, f"dp=2 sync=diloco every=4 wire={after}", {})
        other.load(tmp_path / after)
        for bucket in (bucket for unit in other.units for bucket in unit.buckets):
            assert after == "auto" or not bucket.reduction_state["outer_error"].any()
        return agreed(trainer), agreed(other)

    found = run(2, main, args=("auto", "int8"))
    with pytest.warns(
        UserWarning, match=r"has errors of a codec, of norm 0\.\d+, which 'dp=2 sync=diloco every=4' drops"
    ):
        found += run(2, main, args=("int8", "auto"))
    assert all(torch.equal(ours, theirs) for ours, theirs in found)


@pytest.mark.parametrize("skipping", [(0,), (0, 1)])
def test_replicas_without_an_update_keep_their_errors(skipping: tuple[int, ...]) -> None:
    """Steps whose gradients are not finite are skipped; a round of them moves the agreed parameters by the others."""

    def main(world: World) -> tuple[list[float], float]:
        options = Options(sync={"outer_lr": 1.0, "outer_momentum": 0.0, "blend": 0.5}, nonfinite="skip:9")
        plan = "dp=2 sync=diloco every=1 wire=int4"
        trainer = parallelize(layer(), plan, loss=square_loss, world=world, options=options, lr=LR)
        moved = []
        for step in range(4):
            x, y = rows(step, 2)
            if step == 2 and world.rank in skipping:
                x = x * torch.inf
            before = agreed(trainer)
            trainer.step((x, y))
            moved.append(float((agreed(trainer) - before).abs().max()))
        return moved, float(summed_errors(trainer).abs().max())

    for moved, error in run(2, main):
        assert max(moved) < 3 * LR
        assert (moved[2] < 1e-12) == (len(skipping) == 2)
        assert moved[3] > 0.1 * LR
        assert error < 3 * LR


@pytest.mark.parametrize("wire, part", [("int8", 3.9), ("fp8", 3.9), ("int4", 7.7), ("1bit", 28)])
def test_a_round_sends_the_bytes_of_the_codec(wire: str, part: float) -> None:
    """Each replica sends its codes once in an all-to-all, and its shard of their sums once in an all-gather."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(301, 301) for _ in range(2))).float()

    def loss(output: Tensor, _batch: Any) -> tuple[Tensor, int]:
        return output.square().sum(), len(output)

    def main(world: World, wire: str) -> float:
        trainer = parallelize(build, f"dp=4 sync=diloco every=2 wire={wire}", world=world, loss=loss, lr=1e-3)
        trainer.step(torch.ones(4, 301))
        with trainer.world.record() as calls:
            trainer.step(torch.ones(4, 301))
        return sum(call.bytes * bus_factor(call.kind, ranks=4) for call in calls)

    whole, coded = (run(4, main, args=(each,))[0] for each in ("auto", wire))
    assert coded == pytest.approx(whole / part, rel=0.03)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("sync=local wire=int8 every=4", {"group": 2}, "group=2 agrees about whole parameters"),
    ("sync=gossip wire=int8", {}, "a codec needs changes"),
    ("sync=diloco wire=bf16", {}, "Nearest that works: 'dp=2 sync=diloco'"),
    ("sync=diloco wire=powersgd:4", {}, "Nearest that works: 'dp=2 wire=int8 sync=diloco'"),
    ("sync=diloco wire=int8", {"join": "host:29400"}, "or diloco and wire=auto in the plan"),
    ("sync=diloco wire=int8", {"wire": "int4"}, "no setting 'wire'"),
]


@pytest.mark.parametrize("plan, settings, message", REFUSED)
def test_what_cannot_be_encoded_is_refused(plan: str, settings: dict[str, Any], message: str) -> None:
    def main(world: World) -> None:
        with pytest.raises(PlanError, match=re.escape(message)):
            made(world, f"dp=2 {plan}", settings=settings)

    run(2, main)
