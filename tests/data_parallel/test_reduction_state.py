"""Test that the state of a reduction belongs to logical parameters: it counts as memory, is saved and resharded."""

import functools
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from data_parallel.hand_made_engine import HandMade
from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import World
from meshwise.data_parallel.gradient_reduction import ReducedPart, ReducingRanks, Reduction
from meshwise.engine.parallelize import parallelize
from meshwise.model.parameter_table import parameter_table
from meshwise.testing import run

STEP = 0.25


@dataclass(frozen=True)
class Coarse(Reduction):
    """Gradients travel as multiples of `STEP`; the error of each rank goes with its next gradient."""

    owned_state: tuple[str, ...] = ("sent",)
    summed_state: tuple[str, ...] = ("error",)

    def start(self, gradients: Tensor, *, into: Tensor | None, peers: ReducingRanks) -> ReducedPart:
        wanted = gradients + peers.state["error"]
        gradients.copy_((wanted / STEP).round() * STEP)
        peers.state["error"].copy_(wanted - gradients)
        part = super().start(gradients, into=into, peers=peers)
        part.work.wait()
        peers.state["sent"].add_(part.values)
        return part


ZERO = {
    0: Coarse(),
    1: Coarse(shards_updates=True),
    2: Coarse(shards_updates=True, shards_gradients=True),
    3: Coarse(shards_updates=True, shards_gradients=True, shards_parameters=True),
}


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    generator = torch.Generator().manual_seed(2)
    for parameter in made.parameters():
        parameter.data.normal_(generator=generator)
    return made


def hand_made(joined: World, *, zero: int) -> HandMade:
    world = joined.over(Mesh((("pp", 1), ("dp", joined.size))))
    module = model()
    return HandMade(module, parameter_table(module, replicas=("dp",)), world, ZERO[zero])


def train(training: HandMade, *, step: int) -> dict[str, Tensor]:
    """Return the gradients of all ranks, added up, after a step on them."""
    generator = torch.Generator().manual_seed(10 * step + training.world.rank)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64).to(training.world.device)
    plain = model().to(training.world.device)
    with torch.no_grad():
        for name, value in training.engine.full_parameters():
            plain.get_parameter(name).copy_(value)
    plain(x).square().sum().backward()
    exact = {}
    for name, parameter in plain.named_parameters():
        exact[name] = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        training.world.all_reduce(exact[name], axes="dp").wait()
    training.step(training.module(x).square().sum())
    return exact


def state(training: HandMade) -> dict[str, dict[str, Tensor]]:
    """Return, by parameter, what was sent and the sum of the errors, as full tensors."""
    found: dict[str, dict[str, Tensor]] = {}
    for slot in ("sent", "error"):
        owned = {
            bucket: bucket.reduction_state["sent"] if slot == "sent" else bucket.summed_shard("error")
            for bucket in training.engine.buckets
        }
        for bucket, values in owned.items():
            whole = values
            if values.numel() < bucket.place.size:
                whole = values.new_empty(bucket.place.size)
                training.world.all_gather(values.contiguous(), into=whole, axes="dp").wait()
            for piece in bucket.place.pieces:
                part = whole[piece.start : piece.stop].view(piece.shape)
                found.setdefault(piece.row.name, {})[slot] = part.clone()
    return found


@pytest.mark.parametrize("before, after", [((2, 1), (3, 0)), ((3, 0), (2, 3)), ((2, 3), (1, 2)), ((3, 2), (4, 1))])
def test_sent_and_error_add_up_to_the_gradients_across_a_change_of_plan(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    def first(joined: World) -> list[dict[str, Tensor]]:
        training = hand_made(joined, zero=before[1])
        exact = [train(training, step=step) for step in range(2)]
        training.save(tmp_path / "saved")
        return exact

    def second(joined: World) -> None:
        training = hand_made(joined, zero=after[1])
        training.state.load(tmp_path / "saved")
        exact = [*earlier, train(training, step=2)]
        for name, kept in state(training).items():
            wanted = torch.stack([gradients[name].cpu() for gradients in exact]).sum(0)
            assert float(kept["error"].abs().max()) > 0
            torch.testing.assert_close((kept["sent"] + kept["error"]).cpu(), wanted, rtol=1e-12, atol=1e-12)

    earlier = run(before[0], first)[0]
    run(after[0], second)


def test_it_is_counted_as_memory_of_its_own() -> None:
    def main(joined: World) -> tuple[dict[str, int], int]:
        training = hand_made(joined, zero=1)
        return training.engine.memory(), sum(bucket.place.size for bucket in training.engine.buckets)

    for memory, size in run(2, main):
        assert memory["reduction"] == (size // 2 + size) * 8


def test_without_it_in_a_checkpoint_it_begins_at_zero(tmp_path: Path) -> None:
    def first(joined: World) -> None:
        world = joined.over(Mesh((("pp", 1), ("dp", 2))))
        module = model()
        plain = HandMade(module, parameter_table(module, replicas=("dp",)), world, Reduction(shards_updates=True))
        train(plain, step=0)
        plain.save(tmp_path / "saved")

    def second(joined: World) -> None:
        training = hand_made(joined, zero=1)
        train(training, step=0)
        training.state.load(tmp_path / "saved")
        assert all(not kept.any() for each in state(training).values() for kept in each.values())

    run(2, first)
    run(2, second)


@pytest.mark.parametrize(
    "before, after", [("dp=2 wire=1bit", "dp=2"), ("dp=2 sync=diloco every=2 wire=int8", "dp=2 sync=diloco every=2")]
)
def test_a_plan_that_drops_saved_errors_names_their_norm(before: str, after: str, tmp_path: Path) -> None:
    def main(world: World, plan: str, *, loads: bool) -> float:
        model = nn.Linear(32, 16)
        trainer = parallelize(model, plan, loss=lambda y, _: (y.square().sum(), len(y)), world=world, lr=1e-2)
        if loads:
            trainer.load(tmp_path / "saved")
            return 0.0
        for step in range(4):
            trainer.step(torch.randn(4, 32, generator=torch.Generator().manual_seed(step)))
        trainer.save(tmp_path / "saved")
        [bucket] = [bucket for unit in trainer.units for bucket in unit.buckets]
        lost = bucket.reduction_state.get("outer_error")
        return float((bucket.summed_state("error") if lost is None else lost).norm())

    norm = run(2, functools.partial(main, loads=False), args=(before,))[0]
    with pytest.warns(UserWarning, match=rf"errors of a codec, of norm {norm:.3g}, which .* drops\. Resume"):
        run(2, functools.partial(main, loads=True), args=(after,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(2, functools.partial(main, loads=True), args=(before,))
