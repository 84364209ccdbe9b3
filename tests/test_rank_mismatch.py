"""Test that ranks with different batches raise an error that says what to change."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.step_result import batch_digest
from meshwise.plan import Plan
from meshwise.testing import run

ROWS = torch.arange(24.0).view(8, 3)
WIDE = torch.arange(32.0).view(8, 4) / 32


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def train(world: World, plan: str, part: Callable[[int, int], Tensor], local: bool) -> list[float]:
    trainer = parallelize(lambda: torch.nn.Linear(3, 2), plan, loss=squares, world=world, lr=1e-3)
    return [trainer.step(part(world.rank, step), local=local).loss for step in range(2)]


def own_rows(rank: int, _step: int) -> Tensor:
    return ROWS.chunk(2)[rank]


def fewer_rows_later(rank: int, step: int) -> Tensor:
    return ROWS[: 8 - 2 * rank * step]


def same_batch(_rank: int, step: int) -> Tensor:
    return ROWS + step


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3"])
@pytest.mark.parametrize("part, rows", [(own_rows, (4, 4)), (fewer_rows_later, (8, 6))])
def test_a_batch_that_is_not_the_same_on_every_rank_is_refused(
    plan: str, part: Callable[[int, int], Tensor], rows: tuple[int, int]
) -> None:
    with pytest.raises(RanksDisagree, match=r"given different batches.*local=True") as refused:
        run(2, train, args=(plan, part, False))
    assert f"rank 0 a batch of {rows[0]} rows, rank 1 a batch of {rows[1]} rows" in str(refused.value)


def test_batches_of_each_rank_may_differ_with_local_rows() -> None:
    whole = run(2, train, args=("dp=2", same_batch, False))
    parts = run(2, train, args=("dp=2", lambda rank, step: same_batch(rank, step).chunk(2)[rank], True))
    assert whole == parts


def test_a_digest_sees_shapes_dtypes_and_contents() -> None:
    long = torch.zeros(1_000_000)
    changed = long.clone()
    changed[-1] = 1.0
    kinds = [long, changed, long.double(), long.view(1000, 1000), (long, long), {"x": long.bool()}, torch.tensor(1.5)]
    assert len({batch_digest(kind, contents=True) for kind in kinds}) == len(kinds)
    assert batch_digest(long, contents=False) == batch_digest(changed, contents=False)
    assert batch_digest(long.to("meta"), contents=True) == batch_digest(long, contents=False)


class Rows(Dataset[Tensor]):
    """Eight samples."""

    def __len__(self) -> int:
        return len(WIDE)

    def __getitem__(self, index: int) -> Tensor:
        return WIDE[index]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def sampled(world: World, plan: str, by_plan: bool, evaluates: bool) -> tuple[float, float]:
    """Train on local batches of a DistributedSampler; return the first losses under the plan and on the whole batch."""
    options = Options(example=WIDE, tensor_rules={"0": "colwise", "2": "rowwise"})
    trainer = parallelize(build, plan, loss=squares, world=world, options=options, lr=1e-3)
    numbers = (trainer.replicas, trainer.replica) if by_plan else (world.size, world.rank)
    sampler: DistributedSampler[Tensor] = DistributedSampler(Rows(), *numbers, shuffle=True)
    [part] = DataLoader(Rows(), batch_size=len(sampler), sampler=sampler)
    whole = trainer.evaluate([WIDE]).loss
    if evaluates:
        return trainer.evaluate([part], local=True).loss, whole
    return trainer.step(part, local=True).loss, whole


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("plan", ["tp=2", "pp=2", "dp=2 tp=2", "dp=2 pp=2"])
def test_ranks_that_share_rows_refuse_different_local_batches(plan: str, evaluates: bool) -> None:
    with pytest.raises(RanksDisagree, match=r"num_replicas=trainer\.replicas, rank=trainer\.replica"):
        run(Plan.parse(plan).mesh().size, sampled, args=(plan, False, evaluates))


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2 tp=2", "dp=2 pp=2"])
def test_the_numbers_of_the_plan_give_a_sampler_each_row_once(plan: str, evaluates: bool) -> None:
    for part, whole in run(Plan.parse(plan).mesh().size, sampled, args=(plan, True, evaluates)):
        assert part == pytest.approx(whole, rel=1e-5)
