"""Test that replicas under each `sync` are the published algorithm, written plainly in one process, to 1e-12."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import build_whole, run
from sync.plain_replay import Replay

STEPS, BOUND = 7, 1e-12
THIRDS = [{0: 1 / 3, 1: 1 / 3, 2: 1 / 3}, {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}, {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}]
RING_OF_FOUR = [{r: 1 / 3, (r + 1) % 4: 1 / 3, (r + 3) % 4: 1 / 3} for r in range(4)]
HALVES = [{0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}]
RING = {2: HALVES, 3: THIRDS, 4: RING_OF_FOUR}


def build() -> nn.Module:
    return GPT(GPTConfig(vocabulary=16, context=8, layers=2, heads=2, width=8, mlp_ratio=2, tied=True)).double()


def batch(number: int, *, rows: int = 10) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(16, (rows, 5), generator=torch.Generator().manual_seed(number))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


ADAM: dict[str, Any] = {"optimizer": torch.optim.AdamW, "lr": 1e-2, "weight_decay": 0.0}
SGD: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.05, "momentum": 0.9}


def made(world: World, plan: str, *, settings: Mapping[str, Any], training: Mapping[str, Any] = ADAM) -> Trainer:
    options = Options(example=batch(0), parameter_options=lambda _name, _parameter: {}, sync=settings)
    return parallelize(build, plan, world=world, loss=next_token_loss, options=options, **training)


def plain(size: int, *, training: Mapping[str, Any] = ADAM) -> Replay:
    arguments = {key: value for key, value in training.items() if key != "optimizer"}
    optimizer: Callable[..., torch.optim.Optimizer] = training["optimizer"]
    return Replay(
        build_whole(build, seed=0), next_token_loss, lambda parameters: optimizer(parameters, **arguments), size
    )


def local(replay: Replay, *, every: int) -> None:
    if replay.steps % every == 0:
        replay.average_parameters()
        replay.average_state()
        replay.begin_round()


def post_local(replay: Replay, *, every: int) -> None:
    local(replay, every=1 if replay.steps <= 2 else every)


def kept_state(replay: Replay, *, every: int) -> None:
    if replay.steps % every == 0:
        replay.average_parameters()
        replay.begin_round()


def reset_state(replay: Replay, *, every: int) -> None:
    if replay.steps % every == 0:
        kept_state(replay, every=1)
        for optimizer in replay.optimizers:
            optimizer.state.clear()


def slowmo(replay: Replay, *, every: int) -> None:
    if replay.steps % every == 0:
        lr = replay.optimizers[0].param_groups[0]["lr"]
        replay.outer_step(lr=1.0, momentum=0.7, nesterov=False, unit=lr)
        replay.begin_round()


def diloco(replay: Replay, *, every: int) -> None:
    if replay.steps % every == 0:
        replay.outer_step(lr=0.5, momentum=0.9, nesterov=True)
        replay.begin_round()


def gossip(replay: Replay, *, every: int) -> None:
    if replay.steps % every == 0:
        replay.mix(RING[replay.size])


def easgd(replay: Replay, *, every: int) -> None:
    """Move each replica by alpha towards the centre, and the centre by n alpha = 0.9 towards their mean."""
    if replay.steps % every == 0:
        mean = replay.average(replay.parameters(), weights=replay.weights())
        for replica in replay.parameters():
            for value, centre in zip(replica, replay.anchor, strict=True):
                value.sub_(0.9 / replay.size * (value - centre))
        for centre, value in zip(replay.anchor, mean, strict=True):
            centre.add_(0.9 * (value - centre))
        replay.begin_round()


SCHEMES: Mapping[str, tuple[str, Mapping[str, Any], Callable[..., None]]] = {
    "local": ("local", {}, local),
    "post_local": ("local", {"after": 2}, post_local),
    "kept_state": ("local", {"state": "keep"}, kept_state),
    "reset_state": ("local", {"state": "reset"}, reset_state),
    "slowmo": ("slowmo", {}, slowmo),
    "diloco": ("diloco", {"outer_lr": 0.5}, diloco),
    "gossip": ("gossip", {}, gossip),
    "easgd": ("easgd", {}, easgd),
}


def rates(optimizer: torch.optim.Optimizer, *, step: int) -> None:
    """Change the learning rate as a schedule does."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + step)


def replayed(scheme: str, *, size: int, every: int, rows: int) -> dict[str, Tensor]:
    replay, (_, _, agree) = plain(size), SCHEMES[scheme]
    for number in range(STEPS):
        for optimizer in replay.optimizers:
            rates(optimizer, step=number)
        replay.local_step(batch(number, rows=rows))
        agree(replay, every=every)
    return replay.mean()


def trained(trainer: Trainer, *, first: int, rows: int) -> dict[str, Tensor]:
    for number in range(first, STEPS):
        rates(trainer.optimizer, step=number)
        trainer.step(batch(number, rows=rows))
    return {name: value.clone() for name, value in trainer.full_parameters()}


def require_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], *, bound: float = BOUND) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, rtol=bound, atol=bound), name


@pytest.mark.grid(
    Grid(
        {
            "scheme": tuple(SCHEMES),
            "shape": ("dp=2", "dp=3", "dp=4", "dp=2 tp=2", "dp=2 pp=2 microbatches=2", "dp=2 cp=2 context=ring"),
            "every": (1, 3),
            "rows": (10, 12),
        },
        # Replicas with as many rows as others weigh the same, which shows less.
        cost=lambda cell: (3.0 if "2 " in cell["shape"] else 1.0) * (1.0 if cell["rows"] == 10 else 2.0),
        strength=1,
    )
)
def test_a_plan_is_the_published_algorithm(scheme: str, shape: str, every: int, rows: int) -> None:
    name, settings, _ = SCHEMES[scheme]
    plan = f"{shape} sync={name} every={every}"

    def main(world: World) -> dict[str, Tensor]:
        return trained(made(world, plan, settings=settings), first=0, rows=rows)

    size = int(shape[3])
    ranks = size * (1 if shape == f"dp={size}" else 2)
    expected = replayed(scheme, size=size, every=every, rows=rows)
    for found in run(ranks, main):
        require_equal(found, expected)


def test_slowmo_keeps_its_momentum_in_units_of_the_mean_learning_rate() -> None:
    replay, own = plain(3), [1e-2, 2e-2, 5e-2]
    for optimizer, lr in zip(replay.optimizers, own, strict=True):
        optimizer.param_groups[0]["lr"] = lr
    for number in range(STEPS):
        replay.local_step(batch(number))
        if replay.steps % 2 == 0:
            unit = sum(weight * lr for weight, lr in zip(replay.weights(), own, strict=True))
            replay.outer_step(lr=1.0, momentum=0.7, nesterov=False, unit=unit)
            replay.begin_round()

    def main(world: World) -> dict[str, Tensor]:
        trainer = made(world, "dp=3 sync=slowmo every=2", settings={})
        trainer.optimizer.param_groups[0]["lr"] = own[world.rank]
        for number in range(STEPS):
            trainer.step(batch(number))
        return {name: value.clone() for name, value in trainer.full_parameters()}

    for found in run(3, main):
        require_equal(found, replay.mean())


def test_a_round_of_slowmo_at_a_rate_of_zero_moves_nothing() -> None:
    """The outer momentum is in units of the rate, and moved the parameters by the momentum divided by it."""

    def main(world: World) -> None:
        trainer = made(world, "dp=2 sync=slowmo every=2", settings={}, training=SGD)
        for number in range(6):
            if number == 4:
                trainer.optimizer.param_groups[0]["lr"] = 0.0
                before = {name: value.clone() for name, value in trainer.full_parameters()}
            trainer.step(batch(number))
        require_equal({name: value.clone() for name, value in trainer.full_parameters()}, before)

    run(2, main)


@pytest.mark.grid(
    Grid(
        {"scheme": tuple(SCHEMES), "step": (2, 3, 4), "tp": (1, 2)},
        cost=lambda cell: cell["tp"] * (1.0 if cell["step"] != 3 else 2.0),  # after step 3 the round is over
        strength=1,
    )
)
def test_a_resumed_round_is_as_if_it_had_not_stopped(tmp_path: Path, scheme: str, step: int, tp: int) -> None:
    name, settings, _ = SCHEMES[scheme]

    def begin(world: World) -> None:
        trainer = made(world, f"dp=3 sync={name} every=3", settings=settings)
        for number in range(step):
            rates(trainer.optimizer, step=number)
            trainer.step(batch(number))
        trainer.save(tmp_path / "half")

    def go_on(world: World, plan: str) -> dict[str, Tensor]:
        trainer = made(world, f"{plan} sync={name} every=3", settings=settings)
        trainer.load(tmp_path / "half")
        return trained(trainer, first=step, rows=10)

    run(3, begin)
    expected = replayed(scheme, size=3, every=3, rows=10)
    require_equal(run(3 * tp, go_on, args=(f"dp=3 tp={tp}",))[0], expected)


def test_a_checkpoint_has_the_mean_for_any_other_plan(tmp_path: Path) -> None:
    replay = plain(3)

    def begin(world: World) -> None:
        trainer = made(world, "dp=3 sync=diloco every=8", settings={})
        for number in range(2):
            trainer.step(batch(number))
        trainer.save(tmp_path / "half")

    def loaded(world: World, plan: str) -> dict[str, Tensor]:
        trainer = made(world, plan, settings={})
        trainer.load(tmp_path / "half")
        found = {name: value.clone() for name, value in trainer.full_parameters()}
        trainer.step(batch(2))
        return found

    run(3, begin)
    for number in range(2):
        replay.local_step(batch(number))
    for ranks, plan in ((1, "dp=1"), (2, "dp=2 zero=3"), (2, "dp=2 sync=diloco every=8"), (2, "dp=2 sync=local")):
        for found in run(ranks, loaded, args=(plan,)):
            require_equal(found, replay.mean())


def test_an_evaluation_uses_the_mean_and_leaves_every_replica_as_it_was() -> None:
    replay = plain(2)
    for number in range(2):
        replay.local_step(batch(number))
    model = replay.models[0]
    own = {name: value.detach().clone() for name, value in model.named_parameters()}
    for name, value in replay.mean().items():
        model.get_parameter(name).data.copy_(value)
    with torch.no_grad():
        total, count = next_token_loss(model(batch(9)[0]), batch(9))

    def main(world: World) -> tuple[float, dict[str, Tensor]]:
        trainer = made(world, "dp=2 sync=local every=8", settings={})
        for number in range(2):
            trainer.step(batch(number))
        loss = trainer.evaluate([batch(9)]).loss
        return loss, {name: value.detach().clone() for name, value in trainer.model.named_parameters()}

    found = run(2, main)
    assert [loss for loss, _ in found] == pytest.approx([float(total / count)] * 2, rel=1e-12)
    require_equal(found[0][1], own)
    assert any(not torch.allclose(value, found[1][1][name], atol=1e-6) for name, value in found[0][1].items())


def test_one_step_rounds_of_sgd_with_averaged_momenta_are_synchronous_training() -> None:
    def main(world: World, plan: str, training: dict[str, Any]) -> dict[str, Tensor]:
        trainer = made(world, plan, settings={}, training=training)
        for number in range(3):
            trainer.step(batch(number))
        return {name: value.clone() for name, value in trainer.full_parameters()}

    synchronous = run(3, main, args=("dp=3", SGD))[0]
    require_equal(run(3, main, args=("dp=3 sync=local", SGD))[0], synchronous)
    with pytest.raises(AssertionError):  # Adam's update is no linear function of the gradient
        require_equal(run(3, main, args=("dp=3 sync=local", ADAM))[0], run(3, main, args=("dp=3", ADAM))[0], bound=1e-3)
