"""Test steps whose update must not be applied."""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import take_rows
from meshwise.comm.api.flight_recorder import CallRecord, RanksDisagree
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.step_result import NonFiniteError
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan
from meshwise.testing import agree, run
from two_layers import ROWS, Two, bad, good, made, over_plans, squares, state

# ---- not finite ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row, rank, micro", [(7, 1, 1), (0, 0, 0), (5, 1, 0)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_nan_names_the_rank_the_micro_batch_and_the_parameters(zero: int, row: int, rank: int, micro: int) -> None:
    def main(world: World) -> None:
        made(world, f"dp=2 zero={zero} microbatches=2").step(bad(row))

    where = f"(micro-batch {micro})"
    nearest_first = re.escape(f"rank {rank}: second.bias {where}, second.weight {where}, first.bias {where} and 1 more")
    with pytest.raises(NonFiniteError, match=f"the loss is nan .*nearest to the loss first: {nearest_first};"):
        run(2, main)


def test_a_parameter_that_is_not_finite_itself_is_named() -> None:
    def build() -> nn.Module:
        model = Two().requires_grad_(requires_grad=False)
        model.first.weight[0, 0] = math.nan
        model.second.requires_grad_()
        return model

    def main(world: World) -> None:
        trainer = parallelize(build(), "dp=2 zero=3", world=world, loss=squares, lr=1e-2)
        with pytest.raises(NonFiniteError, match=r"; parameters that are not finite themselves: first\.weight; the up"):
            trainer.step(good())

    run(2, main)


@over_plans
def test_a_step_that_raises_leaves_parameters_and_optimizer_as_they_were(plan: str) -> None:
    def main(world: World) -> None:
        trainer = made(world, plan)
        trainer.step(good())
        before = state(trainer)
        with pytest.raises(NonFiniteError, match=r"the update was not applied\. Lower the learning rate"):
            trainer.step(bad())
        agree(state(trainer), before, bound=0.0)

    run(2, main)


@over_plans
def test_skipping_changes_nothing_and_ends_after_n_in_a_row(plan: str) -> None:
    def main(world: World) -> None:
        trainer = made(world, plan, options=Options(nonfinite="skip:2"))
        trainer.step(good())
        before = state(trainer)
        for _ in range(2):
            result = trainer.step(bad())
            assert result.skipped
            assert result.problem is not None
            assert "rank 1: second.bias" in result.problem
            assert math.isnan(result.loss)
            assert result.tokens == ROWS
        agree(state(trainer), before, bound=0.0)
        with pytest.raises(NonFiniteError, match=r"rank 1: .*; nonfinite='skip:2' allows no more such steps"):
            trainer.step(bad())
        agree(state(trainer), before, bound=0.0)

    run(2, main)


@over_plans
def test_a_skipped_step_is_as_if_it_had_not_been(plan: str) -> None:
    def main(world: World, batches: list[Tensor]) -> dict[str, Any]:
        trainer = made(world, plan, options=Options(nonfinite="skip:1"))
        results = [trainer.step(batch) for batch in batches]
        assert [result.skipped for result in results] == [bool(batch.isnan().any()) for batch in batches]
        assert [result.problem is None for result in results] == [not result.skipped for result in results]
        return state(trainer)

    with_bad = run(2, main, args=([bad(), good(1), bad(0), good(2)],))
    without = run(2, main, args=([good(1), good(2)],))
    for ours, theirs in zip(with_bad, without, strict=True):
        agree(ours, theirs, bound=0.0)


def test_gradients_that_overflow_only_in_their_sum_are_reported_as_such() -> None:
    def huge(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return output.sum() * 3e38 / 4, 1

    def main(world: World) -> None:
        model = nn.Linear(1, 1, bias=False)
        parallelize(model, "dp=2", world=world, loss=huge, lr=1e-2).step(torch.ones(8, 1))

    with pytest.raises(NonFiniteError, match=r"every rank's own gradients are finite .* their sum overflowed"):
        run(2, main)


# ---- losses --------------------------------------------------------------------------------------------------------


def nothing(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.sum() * 0, 0


def constant(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return torch.zeros(()), 0


@pytest.mark.parametrize("loss", [nothing, constant])
@over_plans
def test_a_loss_that_counts_nothing_is_not_applied(plan: str, loss: Any) -> None:
    def main(world: World) -> None:
        trainer = made(world, plan, loss=loss, options=Options(nonfinite="skip:1"), weight_decay=0.5)
        before = state(trainer)
        result = trainer.step(good())
        assert (result.skipped, result.tokens) == (True, 0)
        assert result.problem == "the loss counted nothing in this step: every rank returned a count of 0"
        assert math.isnan(trainer.evaluate([good()]).loss)
        agree(state(trainer), before, bound=0.0)
        with pytest.raises(NonFiniteError, match=r"the loss counted nothing .*; nonfinite='skip:1' allows no more"):
            trainer.step(good())
        with pytest.raises(NonFiniteError, match=r"the loss counted nothing .*Look at the batch: it may have no rows"):
            made(world, plan).step(good()[:0])

    run(2, main)


@pytest.mark.parametrize("plan", ["dp=2 sync=local every=9", "dp=2 server=1 staleness=async"])
def test_a_replica_without_counts_is_named_where_replicas_step_apart(plan: str) -> None:
    def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return output.sum(), int((batch > 0).any())

    def main(world: World) -> str | None:
        options = Options(nonfinite="skip:1")
        trainer = parallelize(nn.Linear(1, 1), plan, world=world, loss=loss, lr=1e-2, options=options)
        return trainer.step(torch.tensor([[1.0], [-1.0]])).problem

    problem = "the loss counted nothing in this step: rank 1 returned a count of 0"
    assert run(Plan.parse(plan).mesh().size, main)[:2] == [None, problem]


@pytest.mark.threads("it reads the warnings of this process")
@over_plans
def test_a_loss_without_a_graph_is_reported_once(plan: str) -> None:
    def main(world: World) -> None:
        trainer = made(world, plan, loss=lambda output, batch: squares(output.detach(), batch))
        trainer.step(good())
        trainer.step(2 * good())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run(2, main)
    (only,) = (str(warning.message) for warning in caught)
    assert "the gradient of every parameter is 0" in only
    assert "break the graph" in only


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 microbatches=2", "dp=2 zero=2"])
def test_a_rank_with_a_constant_loss_does_not_hide_the_rank_of_the_nan(plan: str) -> None:
    def main(world: World) -> None:
        made(world, plan, loss=constant if world.rank == 0 else squares).step(bad())

    with pytest.raises(NonFiniteError, match=r"rank 1: second\.bias"):
        run(2, main)


@pytest.mark.parametrize(
    "returned, message",
    [
        (lambda total: total, "loss returned a float32 tensor of shape ().*must return (sum, count)"),
        (lambda total: (total, 1, 2), "loss returned tuple of 3"),
        (lambda total: [total, 1], "loss returned list"),
        (lambda _total: (3.0, 1), "the sum that loss returned is float"),
        (lambda total: (total.expand(2), 1), "the sum that loss returned is a float32 tensor of shape (2,)"),
        (lambda total: (total.long(), 1), "the sum that loss returned is a int64 tensor"),
        (lambda total: (total, torch.ones(3)), "the count that loss returned is a float32 tensor of shape (3,)"),
        (lambda total: (total, -1), "the count that loss returned is -1"),
        (lambda total: (total, None), "the count that loss returned is None"),
        (lambda total: (total, math.inf), "the count that loss returned is inf"),
        (lambda total: (total, torch.tensor(-3)), "a count that loss returned is below 0 or NaN"),
        (lambda total: (total, torch.tensor(math.inf)), "the counts that loss returned add up to inf"),
    ],
)
def test_a_loss_returns_a_sum_and_a_count(returned: Callable[[Tensor], Any], message: str) -> None:
    def main(world: World, use: Callable[[Trainer], Any]) -> None:
        use(made(world, "dp=1", loss=lambda output, _batch: returned(output.sum())))

    for use in (lambda trainer: trainer.step(good()), lambda trainer: trainer.evaluate([good()])):
        with pytest.raises(ValueError, match=".*".join(re.escape(part) for part in message.split(".*"))):
            run(1, main, args=(use,))


# ---- rows ----------------------------------------------------------------------------------------------------------


@over_plans
@pytest.mark.parametrize("cut", [0, 1, 5, 8])
def test_rows_may_be_split_over_ranks_in_any_way(plan: str, cut: int) -> None:
    def main(world: World, local: bool) -> tuple[float, float, int, dict[str, Any]]:
        start, stop = ((0, cut), (cut, ROWS))[world.rank]
        batch = good().double()
        trainer = parallelize(lambda: Two().double(), plan, world=world, loss=squares, lr=1e-2)
        result = trainer.step(take_rows(batch, start=start, stop=stop) if local else batch, local=local)
        return result.loss, result.grad_norm, result.tokens, state(trainer)["parameters"]

    for ours, theirs in zip(run(2, main, args=(True,)), run(2, main, args=(False,)), strict=True):
        agree(ours, theirs, bound=1e-9)


# ---- ranks that disagree ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stray", [torch.ones(()), torch.ones(4, dtype=torch.float64)])
@over_plans
def test_a_collective_of_one_rank_only_is_reported(plan: str, stray: Tensor) -> None:
    def main(world: World) -> None:
        view = world.over(world.mesh)

        def only_on_the_first() -> None:
            if world.rank == 0:
                view.all_reduce(stray.clone(), axes=("rank",)).wait()

        parallelize(Two(only_on_the_first), plan, world=world, loss=squares, lr=1e-2).step(good())

    with pytest.raises(RanksDisagree, match=r"different collectives|only_on_the_first"):
        run(2, main)


@over_plans
def test_gradients_of_ranks_whose_calls_differed_are_not_applied(plan: str) -> None:
    """A backend that takes what it gets: the second rank believes that it called something else."""

    def main(world: World) -> None:
        def slip() -> None:
            if world.rank == 1 and slips:
                slips.pop()
                record = CallRecord(
                    world.flight_recorder.calls, "broadcast", ("dp",), (3,), "float32", 12, "model.py:7 forward"
                )
                world.flight_recorder.write(record, ranks=(0, 1))

        slips: list[int] = []
        trainer = parallelize(Two(slip), plan, world=world, loss=squares, lr=1e-2)
        trainer.step(good())
        before = state(trainer)
        slips.append(1)
        with pytest.raises(RanksDisagree, match=r"(?s)different collectives in this step.*rank 1 .*model.py:7"):
            trainer.step(good())
        agree(state(trainer), before, bound=0.0)

    run(2, main)
