"""Test experts with `dp=4x8` and with `hpz`: ranks of a group divide the experts and shard them, groups hold replicas.

Every plan gives the numbers of one process to 1e-9. Dense parameters are sharded over all ranks of a group, experts
over its ranks with the same experts. The bytes of a step and of the state equal formulas."""

from typing import Any

import pytest

from data_parallel.test_collective_counts import TOTALS, padded
from expert.test_agreement import batches, build, check, training
from expert.test_storage import trainer_of
from grid import Grid, ranks_of
from joined_worlds import holds_together
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.optim import LAMB
from meshwise.plan import Plan
from meshwise.reference import next_token_loss
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.testing import Counts, agree, alone, count, outcome, run

RANKS = (
    "dp=2x2 ep=2",
    "dp=2x2 ep=4",
    "dp=4x1 ep=2",
    "dp=1x4 ep=2",
    "dp=2x1 tp=2 ep=2",
    "dp=2x1 cp=2 ep=4",
)
WIDE = ("dp=2x4 ep=2", "dp=4x2 ep=4", "dp=2x2 tp=2 ep=2 etp=2", "dp=2x2 tp=2 ep=4", "pp=2 dp=2x2 ep=2")

HYBRID = Grid(
    {
        "ranks": (*RANKS, *WIDE),
        "zero": (1, 2, 3),
        "rest": ("", "microbatches=3", "recompute=full microbatches=2"),
        "kind": ("top-2", "biased", "5 experts"),
        "tied": (False, True),
    },
    # zero with each division of plain ranks is in test_hybrid_shards.py
    cost=lambda cell: ranks_of(f"{cell['ranks']} zero=1") * (1 + len(cell["rest"].split())),
    # on half as many ranks another one divides the same, or one of test_agreement.py for etp
    heavy=lambda cell: cell["ranks"] in ("dp=4x2 ep=4", "dp=2x2 tp=2 ep=4", "dp=2x2 tp=2 ep=2 etp=2"),
    strength=1,
)


@pytest.mark.grid(HYBRID)
def test_a_plan_is_one_process(ranks: str, zero: int, rest: str, kind: str, tied: bool) -> None:
    check(f"{ranks} zero={zero} {rest}", kind, tied=tied)


COPIED = Grid(
    {
        "plan": (
            "dp=4 hpz=2 ep=2",
            "dp=4 hpz=2 ep=4 microbatches=2",
            "dp=4 hpz=2 tp=2 ep=2",
            "dp=2x4 hpz=2 ep=2 microbatches=2",
            "dp=8 hpz=2 ep=4",
            "pp=2 dp=4 hpz=2 ep=2 microbatches=2",
        )
    },
    heavy=lambda cell: any(key in cell["plan"] for key in ("dp=8", "dp=2x4", "tp=", "pp=")),
)


@pytest.mark.grid(COPIED)
def test_a_second_copy_of_experts_is_one_process(plan: str) -> None:
    check(f"{plan} zero=3", "top-2")


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2x2 ep=2 zero=3 offload=params:disk,optimizer:disk microbatches=2",
        "dp=2x2 ep=2 zero=1 offload=optimizer:cpu,gradients:disk",
        "dp=2x2 ep=2 zero=2 overlap_gather=1 dispatch=all-gather",
        "dp=2x2 ep=4 zero=3 chunk=3 bucket=1M",
    ],
)
def test_experts_in_groups_go_with_other_keys(plan: str) -> None:
    check(plan, "top-2")


@pytest.mark.parametrize("plan", ["dp=2x2 ep=2 zero=3", "dp=2x2 ep=4 zero=1"])
def test_an_optimizer_of_norms_counts_each_expert_once(plan: str) -> None:
    given = {**training(), "optimizer": LAMB}

    def main(world: World) -> Any:
        trainer = parallelize(lambda: build("top-2", tied=False), plan, world=world, **given)
        steps = outcome(trainer, batches=batches())
        trainer.close()
        return steps

    expected = alone(lambda: build("top-2", tied=False), batches=batches(), **given)
    for steps in run(4, main):
        agree(steps, expected, bound=1e-9)


def counted(world: World, plan: str) -> tuple[Counts, Any, bool]:
    trainer = trainer_of(world, plan)
    trainer.step(batches()[0])
    with world.record() as records:
        trainer.step(batches()[0])
    counts, table = count(records), trainer.table
    trainer.close()
    return counts, table, holds_together(world)


@pytest.mark.grid(Grid({"zero": (1, 2, 3)}, heavy=lambda cell: cell["zero"] < 3))
def test_a_step_calls_what_the_formula_says(zero: int) -> None:
    """Four ranks share dense parameters, two of them the same experts; the two groups add up what a rank owns."""
    m, ranks = 2, {"dense": 4, "experts": 2}
    counts, table, together = run(8, counted, args=(f"dp=2x4 ep=2 zero={zero} microbatches={m}",))[0]
    of_experts = lambda row: ".experts." in row.name  # noqa: E731
    dense = [2 * padded((row for row in unit.rows if not of_experts(row)), ranks=4) for unit in table.units]
    held = [sum(row.numel for row in unit.rows if of_experts(row)) * 8 // 2 for unit in table.units]
    (p, u), (e, v) = (sum(dense), len(dense)), (sum(held), len([each for each in held if each]))
    assert not any(size % (ranks["experts"] * 16 * 8) for size in held)  # experts need no padding
    rounds = m if zero > 1 else 1
    gathers = {"dense": (m * (2 * u - 1), m * (2 * p - dense[-1])), "experts": (m * 2 * v, m * 2 * e)}
    if zero < 3 or together:
        gathers = {"dense": (u, p), "experts": (v, e)}
    tokens = {name: each for name, each in counts.items() if name.startswith("all_to_all")}
    assert tokens.keys() == {"all_to_all[dp_ep]"}
    counts.check(
        {
            "all_reduce[dp_outer·dp_shard·dp_ep]": TOTALS,
            "reduce_scatter[dp_shard·dp_ep]": (rounds * u, rounds * p),
            "reduce_scatter[dp_shard]": (rounds * v, rounds * e),
            "all_reduce[dp_outer]": (u + v, p // ranks["dense"] + e // ranks["experts"]),
            "all_gather[dp_shard·dp_ep]": gathers["dense"],
            "all_gather[dp_shard]": gathers["experts"],
            **tokens,
        }
    )


@pytest.mark.threads("ranks of a host that share memory gather no parameters", or_gpus=True)
@pytest.mark.parametrize("plan, axes", [("dp=4 hpz=2 ep=2", "dp_node"), ("dp=8 hpz=4 ep=2", "dp_node·dp_shard")])
def test_ranks_of_a_node_divide_the_second_copy_of_the_same_experts(plan: str, axes: str) -> None:
    """All ranks with the same experts gather them once a step; later gathers stay in the node."""
    m, layers, ep = 2, 2, 2
    counts, table, _ = run(
        Plan.parse(f"{plan} zero=3").mesh().size, counted, args=(f"{plan} zero=3 microbatches={m}",)
    )[0]
    size = sum(row.numel for row in table.rows if ".experts." in row.name) * 8 // ep
    found = {name: each for name, each in counts.items() if name in (f"all_gather[{axes}]", "all_gather[dp_shard]")}
    later = ((2 * m - 1) * layers, (2 * m - 1) * size)
    assert found == {
        f"all_gather[{axes}]": (layers, size),
        **({"all_gather[dp_shard]": later} if "shard" in axes else {}),
    }


@pytest.mark.threads("a rehearsal gathers what ranks of a host share", or_gpus=True)
@pytest.mark.grid(
    Grid(
        {
            "plan": (
                "dp=2x2 ep=2 zero=2 microbatches=2",
                "dp=2x4 ep=2 zero=2 microbatches=2",
                "dp=4x2 ep=4 zero=3",
                "dp=4 hpz=2 ep=2 zero=3",
            )
        },
        heavy=lambda cell: "dp=4x2" in cell["plan"] or "dp=2x4" in cell["plan"],
    )
)
def test_a_rehearsal_makes_the_calls_of_a_step(plan: str) -> None:
    size, subject = Plan.parse(plan).mesh().size, lambda: build("top-2", tied=False)
    found = count(
        call.record
        for part in rehearse(
            RehearsalSubject(subject, next_token_loss, batches()[0], options=training()["options"]),
            plan=plan,
            ranks=size,
        ).steps[0]
        for call in part.calls()
    )
    made = run(size, counted, args=(plan,))[0][0]
    assert found.keys() == made.keys()
    for name, each in found.items():
        # tokens go to the experts that the router chooses, in a rehearsal to all alike
        assert each[0] == made[name][0] if name.startswith("all_to_all") else each == made[name]


@pytest.mark.threads("ranks of a host that share memory have one copy of the parameters", or_gpus=True)
@pytest.mark.grid(
    Grid(
        {"parts": (("dp=2x2 ep=2 zero=3", 2, 2), ("dp=2x4 ep=2 zero=3", 4, 4), ("dp=4x2 ep=4 zero=3", 2, 4))},
        heavy=lambda cell: "dp=4x2" in cell["parts"][0],
    )
)
def test_a_rank_keeps_its_part_of_dense_parameters_and_of_experts(parts: tuple[str, int, int]) -> None:
    """Experts are divided by ep, then by the ranks of a group that hold the same experts."""
    plan, dense, experts = parts

    def kept(world: World, plan: str) -> dict[str, int]:
        trainer = trainer_of(world, plan)
        trainer.step(batches()[0])
        found = dict(trainer.memory())
        trainer.close()
        return found

    own = sum(p.nbytes for name, p in build("top-2", tied=False).named_parameters() if ".experts." in name)
    whole = run(dense, kept, args=(f"dp={dense} zero=1",))[0]
    for found in run(Plan.parse(plan).mesh().size, kept, args=(plan,)):
        for kind in ("parameters", "gradients"):
            assert found[kind] == (whole[kind] - own) // dense + own // experts
