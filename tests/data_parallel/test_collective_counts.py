"""Test that the collectives of a step match the table in `data_parallel_engine.py`, in calls and in bytes.

P and F are the bytes of trained and frozen parameters, each unit padded to equal shards of whole cache lines. u is the
number of units that have any. A step ends with one all-reduce of 4 numbers of 8 bytes (loss, count, norm, digest)."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from grid import Grid
from joined_worlds import holds_together
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.model.parameter_table import ParameterRow, ParameterTable
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import Counts, count, run
from warm_processes import Processes

LINE = 16
TOTALS = (1, 4 * 8)


def build() -> nn.Module:
    return GPT(GPTConfig(vocabulary=16, context=4, layers=3, heads=2, width=8, mlp_ratio=2, bias=True))


def with_frozen() -> nn.Module:
    model = build()
    model.get_submodule("blocks.1.attention").requires_grad_(False)
    return model


def padded(rows: Iterable[ParameterRow], *, ranks: int) -> int:
    """Bytes in fp32 of parameters that lie one after the other, in equal shards of whole lines."""
    elements = sum(row.numel for row in rows)
    return -(-elements // (ranks * LINE)) * ranks * LINE * 4


def sizes(table: ParameterTable, *, trained: bool, ranks: int) -> list[int]:
    """The bytes of each unit that has trained (or frozen) parameters, in the order of the table."""
    units = [[row for row in unit.rows if row.trainable == trained] for unit in table.units]
    return [padded(rows, ranks=ranks) for rows in units if rows]


def counted(world: World, plan: Plan, frozen: bool) -> tuple[Counts, ParameterTable, bool]:
    """With whether the ranks hold the parameters together: then what a rank has updated is all there is to gather."""
    trainer = parallelize(with_frozen() if frozen else build(), plan, world=world, loss=next_token_loss, lr=1e-3)
    tokens = torch.randint(16, (12, 5), generator=torch.Generator().manual_seed(1))
    batch = tokens[:, :-1], tokens[:, 1:]
    trainer.step(batch)
    with world.record() as records:
        trainer.step(batch)
    return count(records), trainer.table, holds_together(world)


GRID = Grid({"zero": (0, 1, 2, 3), "n": (2, 3, 4), "m": (1, 3), "frozen": (False, True)})


@pytest.mark.grid(GRID)
def test_a_step_calls_what_the_formula_says(zero: int, n: int, m: int, frozen: bool) -> None:
    plan = Plan(dp=n, zero=zero, microbatches=m)
    counts, table, together = run(n, counted, args=(plan, frozen))[0]
    trained, others = (sizes(table, trained=which, ranks=n) for which in (True, False))
    p, u = sum(trained), len(trained)
    f, v = sum(others), len(others)
    last = trained[-1]
    expected = {
        0: {"all_reduce[dp]": (u + 1, p + 32)},
        1: {"all_reduce[dp]": TOTALS, "reduce_scatter[dp]": (u, p), "all_gather[dp]": (u, p)},
        2: {"all_reduce[dp]": TOTALS, "reduce_scatter[dp]": (m * u, m * p), "all_gather[dp]": (u, p)},
        3: {
            "all_reduce[dp]": TOTALS,
            "reduce_scatter[dp]": (m * u, m * p),
            "all_gather[dp]": (u, p) if together else (m * (2 * (u + v) - 1), m * (2 * (p + f) - last)),
        },
    }
    counts.check(expected[zero])


def coming_by(world: World) -> tuple[list[str], list[int]]:
    """The collectives of a step by their kinds, and after how many of them this rank came by, each time."""
    came: list[int] = []

    def progress() -> None:
        came.append(len(records))

    vars(world)["progress"] = progress
    trainer = parallelize(build(), "dp=2 zero=2", world=world, loss=next_token_loss, lr=1e-3)
    tokens = torch.randint(16, (4, 5), generator=torch.Generator().manual_seed(1))
    with world.record() as records:
        trainer.step((tokens[:, :-1], tokens[:, 1:]))
    return [record.kind for record in records], came


def test_a_rank_does_its_part_of_a_reduction_while_the_next_gradients_are_computed() -> None:
    kinds, came = run(2, coming_by)[0]
    later = range(1, kinds.count("reduce_scatter") - 1)
    assert later
    assert all(came.count(begun) > 1 for begun in later)  # not only right after it has begun


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_one_rank_calls_nothing(zero: int) -> None:
    assert run(1, counted, args=(Plan(zero=zero, microbatches=3), False))[0][0] == {}


def test_every_rank_calls_the_same() -> None:
    results = run(4, counted, args=(Plan(dp=4, zero=3, microbatches=3), True))
    assert len({repr(counts) for counts, *_ in results}) == 1


@pytest.mark.processes
def test_ranks_that_hold_the_parameters_together_gather_none(processes: Processes) -> None:
    n, m = 4, 3
    counts, table, _ = run(n, counted, args=(Plan(dp=n, zero=3, microbatches=m), True), on=processes)[0]
    trained = sizes(table, trained=True, ranks=n)
    p, u = sum(trained), len(trained)
    counts.check({"all_reduce[dp]": TOTALS, "reduce_scatter[dp]": (m * u, m * p), "all_gather[dp]": (u, p)})
