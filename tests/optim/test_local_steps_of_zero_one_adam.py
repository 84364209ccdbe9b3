"""Test the local steps of 0/1 Adam (`sync=momenta every=H`): replicas exchange momenta, and differ in between.

exact       with `codec="none"` a plan gives the numbers of one process; with `every=1` it is the plan without `sync`
replay      the published algorithm over R replicas in one process gives every parameter of every replica to 1e-9
invariant   what an exchange sends, and all errors, add up to the true mean momenta, whatever the learning rates"""

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grid import Grid
from last_outcome import outcome
from meshwise import Plan, PlanError
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.optim import OneBitAdam, ZeroOneAdam
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, count, run
from meshwise.verify import verify
from optim.test_one_bit_optimizers import (
    BOUND,
    EQUAL,
    ROWS,
    coded,
    expected,
    flat,
    gpt,
    gradient_of,
    layer,
    made,
    parameters,
    rows,
    square_loss,
    tokens,
    wide,
)

DECAY = 0.1
LAYER = layer()  # made once: ranks that are threads share the generator of random numbers
Rate = Callable[[int], float]


def falling(step: int) -> float:
    """Learning rates that differ in each step."""
    return float(0.02 / step**0.5)


def constant(_: int) -> float:
    """A power of 2, by which divisions are exact: then no tie of a scale in fp32 is broken in another way."""
    return 1 / 64


RATES: dict[str, Rate] = {"constant": constant, "falling": falling}


def exact_steps(warmup: int, kappa: int) -> list[int]:
    """Steps that change the variance, up to `warmup`: kappa in a row, then kappa with gaps of 2, of 4, …"""
    steps = [1]
    while len(steps) < 40:
        steps.append(steps[-1] + 2 ** ((len(steps) - 1) // kappa))
    return [step for step in steps if step <= warmup]


def replay(ranks: int, *, codec: str, schedule: dict[str, int], every: int, rate: Rate, steps: int) -> list[Tensor]:
    """Train by Algorithm 1 of arXiv 2202.06009, with AdamW's bias correction and decay; return every replica.

    u: a replica's buffer of learning rates times momenta. T_v are the exact steps, T_u the ends of the intervals."""
    module, beta1, beta2 = layer(), 0.9, 0.999
    used, parts = 37 * 19 + 37, (37 * 19, 37)
    size = -(-used // (16 * ranks)) * 16 * ranks
    zeros = lambda *shape: torch.zeros(*shape, dtype=torch.float64)  # noqa: E731
    x = flat(module.parameters(), size).expand(ranks, size).clone()
    agreed, variance, u, m = x[0], zeros(size), zeros(ranks, size), zeros(ranks, size)
    errors, owners, rates = zeros(ranks, size), zeros(size), 0.0
    exact = exact_steps(schedule["warmup"], schedule["kappa"])
    through = functools.partial(coded, codec=codec, shard=size // ranks, used=used)

    def moved(start: Tensor, change: Tensor, lr: float, done: int, *, limit: float) -> Tensor:
        change = (change / ((variance / (1 - beta2**done)).sqrt() + 1e-8)).clamp(-limit * lr, limit * lr)
        return start * (1 - DECAY * lr) - torch.where(variance == 0, 0.0, change)

    for step in range(1, steps + 1):
        lr, done = rate(step), sum(one <= step for one in exact)
        gradients = []
        batch = rows(step, ranks)
        for own, a, b in zip(x, batch[0].tensor_split(ranks), batch[1].tensor_split(ranks), strict=True):
            for p, value in zip(module.parameters(), own[:used].split(parts), strict=True):
                p.data.copy_(value.view_as(p))
            gradients.append(ranks * gradient_of(module, (a, b), size) / len(batch[0]))
        g = torch.stack(gradients)  # their mean over the replicas is the gradient of the mean loss
        norm = math.sqrt(float(g.mean(0).square().sum() if step in exact else g.square().sum(1).mean()))
        g *= min(1.0, 3.0 / (norm + 1e-6))
        if step in exact:
            m = beta1 * m + (1 - beta1) * g.mean(0)
            variance = beta2 * variance + (1 - beta2) * g.mean(0) ** 2
            x = moved(x, lr * m / (1 - beta1**step), lr, done, limit=math.inf if done == step else 1.0)
            agreed = x[0]
            continue
        m = beta1 * m + (1 - beta1) * g
        u, rates, corrected = u + lr * m, rates + lr, 1 - beta1**step
        after = max(0, step - schedule["warmup"])
        if after % min(every, 2 ** (max(0, after - 1) // schedule["doubling"])):
            x = moved(x, lr * m / corrected, lr, done, limit=1.0)
            continue
        wanted = u + errors
        sent = ranks * rates * through(wanted / (ranks * rates))
        errors = wanted - sent
        due = sent.mean(0) + owners
        total = rates * through(due / rates)
        owners = due - total
        m, x = (total / rates).expand(ranks, size), moved(agreed, total / corrected, rates, done, limit=1.0)
        x, agreed, u, rates = x.expand(ranks, size), x, zeros(ranks, size), 0.0
    return [own[:used].clone() for own in x]


def trained(world: World, plan: str, *, first: int = 1, last: int, rate: Rate = constant, **more: Any) -> Trainer:
    """Train the layer with the steps `first` to `last`, from the checkpoint `load` to the checkpoint `save`."""
    folders = {key: more.pop(key) for key in ("load", "save") if key in more}
    arguments: Any = {"optimizer": ZeroOneAdam, "lr": 0.02, "weight_decay": DECAY, "options": EQUAL} | more
    trainer = parallelize(copy.deepcopy(LAYER), plan, loss=square_loss, world=world, **arguments)
    if "load" in folders:
        trainer.load(folders["load"])
    for step in range(first, last + 1):
        for group in trainer.optimizer.param_groups:
            group["lr"] = rate(step)
        trainer.step(rows(step, world.size))
    if "save" in folders:
        trainer.save(folders["save"])
    return trainer


def own(trainer: Trainer) -> Tensor:
    """The parameters of this rank's replica."""
    return torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])


REPLAYS = Grid(
    {
        "ranks": (2, 4),
        "every": (1, 2, 3, 4),
        "schedule": ((3, 1, 2), (2, 2, 1), (5, 2, 3), (4, 1, 100)),
        "codec": ("1bit", "int8", "topk:0.1"),
        "rate": tuple(RATES),
    },
    cost=lambda cell: cell["ranks"],
    exists=lambda cell: (
        # The scales of int8 are sums of two scales in fp32, often halfway between two numbers of fp32.
        cell["codec"] != "int8" or (cell["rate"] == "constant" and cell["every"] != 3)
    ),
    single=("every", "ranks"),
)


@pytest.mark.grid(REPLAYS)
def test_training_equals_the_algorithm_in_plain_lines(
    ranks: int, every: int, schedule: tuple[int, int, int], codec: str, rate: str
) -> None:
    named = dict(zip(("warmup", "kappa", "doubling"), schedule, strict=True))

    def main(world: World) -> tuple[Tensor, Tensor]:
        trainer = trained(
            world, f"dp={ranks} sync=momenta every={every}", last=14, rate=RATES[rate], codec=codec, **named
        )
        return own(trainer), torch.cat([value.view(-1) for value in parameters(trainer).values()])

    wanted = replay(ranks, codec=codec, schedule=named, every=every, rate=RATES[rate], steps=14)
    for found, replica in zip(run(ranks, main), wanted, strict=True):
        agree(found[0], replica, bound=BOUND)
        agree(found[1], torch.stack(wanted).mean(0), bound=BOUND)


def test_steps_without_a_learning_rate_move_nothing() -> None:
    """The published mean momentum is then 0 / 0; here the last momenta travel."""

    def main(world: World) -> list[Tensor]:
        rate = lambda step: 0.0 if step > 5 else 1 / 64  # noqa: E731 - from an exchange on
        plan = f"dp={world.size} sync=momenta every=2"
        return [own(trained(world, plan, last=last, rate=rate, warmup=3, kappa=2, doubling=2)) for last in (5, 7, 11)]

    first, *others = run(2, main)
    for found in first[1:]:
        assert torch.equal(found, first[0])
    assert torch.equal(others[0][2], first[2])


# ---- exact, and the degenerate point ---------------------------------------------------------------------------------


SHAPES = ("dp=2", "dp=3", "dp=2 tp=2", "dp=2 pp=2 microbatches=2", "dp=2 cp=2", "dp=2 tp=2 sequence_parallel=1")


@pytest.mark.grid(Grid({"shape": SHAPES}, heavy=lambda cell: cell["shape"] in ("dp=2", "dp=2 tp=2")))
def test_without_a_codec_every_plan_is_one_process(shape: str) -> None:
    def main(world: World) -> Any:
        trainer = made(world, f"{shape} sync=momenta every=3", optimizer=ZeroOneAdam, warmup=2, codec="none")
        return outcome(trainer, batches=tokens(*ROWS))

    for found in run(Plan.parse(shape).mesh().size, main):
        agree(found, expected("zero one", 2), bound=BOUND)


EACH_STEP = ("dp=2", "dp=4", "dp=2 pp=2 microbatches=2", "dp=2 tp=2")


@pytest.mark.grid(Grid({"shape": EACH_STEP}, heavy=lambda cell: cell["shape"] != "dp=4"))  # the splits are below
def test_an_exchange_after_every_step_is_the_plan_without_local_steps(shape: str) -> None:
    def main(world: World, sync: str) -> Any:
        # Without biases: the gradient of the keys' bias is 0 but for rounding, of which a codec takes the sign.
        shape_of = GPTConfig(vocabulary=16, context=4, layers=2, heads=4, width=12, mlp_ratio=2, bias=False)
        arguments: Any = {"optimizer": ZeroOneAdam, "lr": 0.02, "warmup": 3, "kappa": 1, "doubling": 1}
        options = Options(example=tokens(6)[0], clip_norm=1.0)
        trainer = parallelize(
            lambda: GPT(shape_of).double(),
            f"{shape} {sync}",
            loss=next_token_loss,
            world=world,
            options=options,
            **arguments,
        )
        results = [trainer.step(batch) for batch in tokens(*ROWS, 6, 5)]
        figures = torch.tensor([(one.loss, one.grad_norm, one.tokens) for one in results], dtype=torch.float64)
        return {"figures": figures, **parameters(trainer)}

    size = Plan.parse(shape).mesh().size
    for found, wanted in zip(run(size, main, args=("sync=momenta",)), run(size, main, args=("",)), strict=True):
        agree(found, wanted, bound=1e-12)


SPLIT = ("dp=2 tp=2", "dp=2 pp=2 microbatches=2", "dp=2 cp=2", "dp=2 microbatches=2")


@pytest.mark.grid(Grid({"shape": SPLIT}, heavy=lambda cell: cell["shape"] == "dp=2 cp=2"))
def test_each_replica_may_be_split(shape: str) -> None:
    """A replica that is split takes the local steps of a whole one, up to the blocks of the codec."""

    def main(world: World) -> list[dict[str, Tensor]]:
        arguments = {"optimizer": ZeroOneAdam, "warmup": 1, "doubling": 1, "codec": "topk:1"}  # which loses nothing
        trainer = made(world, f"{'dp=2' if world.size == 2 else shape} sync=momenta every=4", **arguments)
        found = []
        for batch in tokens(*ROWS, 6, 5):
            trainer.step(batch)
            found.append(parameters(trainer))
        return found

    whole, split = run(2, main)[0], run(Plan.parse(shape).mesh().size, main)
    for found in split:
        agree(dict(enumerate(found)), dict(enumerate(whole)), bound=BOUND)


# ---- what differs between exchanges ----------------------------------------------------------------------------------


LOCAL: dict[str, Any] = {"warmup": 3, "kappa": 1, "doubling": 2}


@pytest.mark.grid(Grid({"ranks": (2, 4), "saved": (6, 7, 8, 10)}, cost=lambda cell: cell["ranks"] ** 2, strength=1))
def test_a_training_resumes_in_equal_bits_within_an_interval(ranks: int, saved: int, tmp_path: Path) -> None:
    def main(world: World) -> tuple[Tensor, Tensor]:
        plan = f"dp={world.size} sync=momenta every=4"
        trained(world, plan, last=saved, rate=falling, save=tmp_path, **LOCAL)
        resumed = trained(world, plan, first=saved + 1, last=14, rate=falling, load=tmp_path, **LOCAL)
        return own(resumed), own(trained(world, plan, last=14, rate=falling, **LOCAL))

    for resumed, straight in run(ranks, main):
        assert torch.equal(resumed, straight)


def test_evaluations_and_exports_use_the_mean_of_the_replicas(tmp_path: Path) -> None:
    def main(world: World) -> tuple[Tensor, ...]:
        trainer = trained(world, "dp=2 sync=momenta every=4", last=14, **LOCAL)  # 3 steps after an exchange
        mine, loss = own(trainer), trainer.evaluate([rows(1, 2)]).loss
        trainer.save(tmp_path / "saved")
        alone = parallelize(
            copy.deepcopy(LAYER), "dp=2", loss=square_loss, world=world, optimizer=ZeroOneAdam, options=EQUAL
        )
        alone.load(tmp_path / "saved")
        assert math.isclose(alone.evaluate([rows(1, 2)]).loss, loss, rel_tol=1e-12)
        agree(parameters(alone), parameters(trainer), bound=1e-12)
        assert torch.equal(own(trainer), mine)
        return mine, torch.cat([value.view(-1) for value in parameters(trainer).values()])

    (one, mean), (other, _) = run(2, main)
    assert float((one - other).abs().max()) > 1e-4
    agree(mean, (one + other) / 2, bound=1e-12)


def state(trainer: Trainer, key: str) -> Tensor:
    return torch.cat(
        [trainer.optimizer.state[p][key] for unit in trainer.units for b in unit.buckets for _, p in b.slices]
    )


@pytest.mark.parametrize("after", [2, 4])
def test_an_exchange_and_its_errors_add_up_also_with_other_replicas(after: int, tmp_path: Path) -> None:
    """From the mean that was saved, new replicas send the mean momentum of the interval and the errors before."""

    def first(world: World) -> None:
        trained(world, "dp=2 sync=momenta every=4", last=14, rate=falling, save=tmp_path, **LOCAL)

    def second(world: World) -> None:
        trainer = trained(world, f"dp={world.size} sync=momenta every=4", first=1, last=0, load=tmp_path, **LOCAL)
        mean = lambda value: torch.stack(world.exchange(value)).mean(0)  # noqa: E731
        lost = mean(state(trainer, "error") + state(trainer, "error_owner"))
        [group] = trainer.optimizer.param_groups
        rate, before = falling(15), dict(group)
        group["lr"] = rate
        average, momentum = state(trainer, "exp_avg_mean"), state(trainer, "exp_avg")
        batch = rows(15, 4)
        gradient = world.size * gradient_of(trainer.model, _part(batch, world), len(average)) / len(batch[0])
        norm = trainer.step(batch).grad_norm
        momentum = 0.9 * momentum + 0.1 * gradient * min(1.0, 3.0 / (norm + 1e-6))
        wanted = mean((before["rates"] * average + rate * momentum) / (before["rates"] + rate))
        wanted += lost * before["sent"] / (before["rates"] + rate)
        errors = mean(state(trainer, "error") + state(trainer, "error_owner"))
        agree(state(trainer, "exp_avg") + errors, wanted, bound=BOUND)
        assert float(errors.abs().max()) > 0
        assert torch.equal(own(trainer), world.exchange(own(trainer))[0])

    run(2, first)
    run(after, second)


def _part(batch: tuple[Tensor, Tensor], world: World) -> Any:
    return tuple(each.tensor_split(world.size)[world.rank] for each in batch)


# ---- bytes, skipped steps, refusals ----------------------------------------------------------------------------------


def test_nothing_travels_between_exchanges_and_packed_bytes_in_one() -> None:
    """P elements in blocks of 256: P / 8 + 4 P / 256 bytes in the all-to-all and the all-gather of one step of 4."""

    def main(world: World) -> list[dict[str, tuple[int, int]]]:
        trainer = parallelize(
            wide(), "dp=4 sync=momenta every=4", loss=square_loss, world=world, optimizer=ZeroOneAdam, warmup=1,
            doubling=1, options=EQUAL,
        )  # fmt: skip
        found = []
        for _ in range(13):
            with world.record() as records:
                trainer.step((torch.ones(4, 256), torch.ones(4, 128)))
            found.append(dict(count(records)))
        return found

    steps = run(4, main)[0]
    packed = sum(
        4 * (shard // 8 + 4 * math.ceil(shard / 256)) for shard in ((256 * 512 + 512) // 4, (512 * 128 + 128) // 4)
    )
    exchanges = [number for number, found in enumerate(steps, start=1) if "all_to_all[dp]" in found]
    assert exchanges == [2, 3, 5, 9, 13]  # after the warm-up: intervals of 1, 2, 4, and no more than `every`
    for number, found in enumerate(steps[1:], start=2):
        assert found["all_reduce[dp]"][1] == 32  # loss, count, norm and digest
        if number in exchanges:
            assert found["all_to_all[dp]"][1] == found["all_gather[dp]"][1] == packed
        else:
            assert found.keys() == {"all_reduce[dp]"}
    assert steps[0]["all_reduce[dp]"][1] - 32 == 4 * (256 * 512 + 512 + 512 * 128 + 128)


def test_replicas_skip_together() -> None:
    """One row of the second replica is infinite: no replica updates."""

    def main(world: World) -> tuple[list[float], bool, bool]:
        options = Options(parameter_options=lambda _name, _parameter: {}, nonfinite="skip:1")
        trainer = parallelize(
            copy.deepcopy(LAYER).float(), "dp=2 sync=momenta every=4", loss=square_loss, world=world,
            optimizer=ZeroOneAdam, warmup=2, doubling=1, lr=0.01, options=options,
        )  # fmt: skip
        losses = [trainer.step(tuple(each.float() for each in rows(0, 2))).loss for _ in range(30)]
        before = own(trainer)
        x, y = (each.float() for each in rows(0, 2))
        skipped = trainer.step((x * torch.tensor([[1.0]] * (len(x) - 1) + [[math.inf]]), y)).skipped
        return losses, skipped, torch.equal(own(trainer), before)

    for losses, skipped, unchanged in run(2, main):
        assert skipped
        assert unchanged
        assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    "plan, arguments, message",
    [
        ("dp=2 sync=momenta zero=1", {}, "differ between agreements cannot share their state .* 'dp=2 sync=momenta'"),
        ("dp=2 sync=momenta precision=fp16", {}, "its own loss scale .* 'dp=2 precision=bf16 sync=momenta'"),
        ("dp=2 sync=momenta every=4 wire=1bit", {}, "it has a codec of its own .* 'dp=2 sync=momenta every=4'"),
        ("dp=2 sync=momenta", {"optimizer": OneBitAdam}, "takes local steps: use ZeroOneAdam, or sync=step"),
        ("dp=2 sync=momenta", {"optimizer": torch.optim.AdamW}, "takes local steps: use ZeroOneAdam, or sync=step"),
        ("dp=2 sync=momenta", {"options": Options(sync={"outer_lr": 0.5})}, "sync=momenta has no settings such as"),
        ("dp=2 sync=momenta", {"doubling": 0}, "doubling=0 is no number of steps; write doubling=32768"),
    ],
)
def test_what_cannot_work_is_refused(plan: str, arguments: dict[str, Any], message: str) -> None:
    def main(world: World) -> None:
        with pytest.raises(ValueError, match=message):
            parallelize(
                copy.deepcopy(LAYER), plan, loss=square_loss, world=world, **{"optimizer": ZeroOneAdam} | arguments
            )

    run(2, main)


def test_open_steps_are_refused() -> None:
    def main(world: World) -> None:
        with pytest.raises(PlanError, match="open_step sums gradients over replicas"):
            trained(world, "dp=2 sync=momenta every=4", last=0).open_step()

    run(2, main)


# ---- leaving local steps, and verify ---------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["dp=2", "dp=3 zero=1", "dp=1"])
def test_a_plan_without_local_steps_adds_the_errors_to_the_momentum(plan: str, tmp_path: Path) -> None:
    def first(world: World) -> tuple[Tensor, Tensor]:
        trainer = trained(world, "dp=2 sync=momenta every=4", last=14, save=tmp_path, **LOCAL)
        kept = torch.stack([state(trainer, "exp_avg"), state(trainer, "error") + state(trainer, "error_owner")])
        momentum, lost = torch.stack(world.exchange(kept)).mean(0)
        return momentum, lost

    def second(world: World) -> tuple[Tensor, Tensor]:
        trainer = trained(world, plan, last=0, load=tmp_path, codec="none", **LOCAL)
        trainer.step(rows(15, 2))
        gradient = torch.cat([value.flatten() for value in [each.clone() for _, each in trainer.full_gradients()]])
        factor = min(1.0, 3.0 / (float(gradient.norm()) + 1e-6))
        [bucket] = [bucket for unit in trainer.units for bucket in unit.buckets]
        return bucket.gathered_from(state(trainer, "exp_avg"))[: 37 * 20].clone(), gradient * factor

    momentum, lost = run(2, first)[0]
    assert float(lost.abs().max()) > 1e-4
    for found, gradient in run(Plan.parse(plan).mesh().size, second):
        agree(found, 0.9 * (momentum + lost)[: 37 * 20] + 0.1 * gradient, bound=BOUND)


def test_verify_compares_without_the_codec_and_says_so() -> None:
    report = verify(
        gpt, next_token_loss, tokens(*ROWS), "dp=2 sync=momenta every=3", optimizer=ZeroOneAdam, warmup=2, lr=0.02
    )
    assert report.ok, str(report)
    assert "dp=2 sync=momenta every=3 is the same model as one process" in report.verdict
    assert "ZeroOneAdam was compared with codec='none'" in str(report)
