"""A search finds what trying everything finds, says why the rest lost, and refuses what the real code refuses."""

import dataclasses
import os
from functools import cache
from typing import Any

import pytest
import torch

from grid import Grid
from meshwise.engine.parallelize import Options
from meshwise.plan import Plan, PlanError
from meshwise.planner.lower_bound import PlanFigures
from meshwise.planner.plan_search import (
    FULL,
    Candidate,
    EstimateLevel,
    ForkedWorkers,
    PlanSearch,
    SearchEffort,
    SearchResult,
    best_table,
    figures_of,
    lost_table,
    search,
)
from meshwise.planner.plan_space import PlanSpace, parse_fixed
from meshwise.reference.gpt import GPT, GPTConfig, next_token_loss
from meshwise.simulate.cluster import parse_cluster
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import Prediction
from warm_command import WarmCommand

CLUSTER = parse_cluster("1x4 h100")
CONFIG = GPTConfig(vocabulary=512, context=128, layers=2, heads=4, width=512)
BATCH = 8
EVERYTHING = 10**6


def subject() -> RehearsalSubject:
    tokens = torch.empty(BATCH, CONFIG.context, dtype=torch.long, device="meta")
    return RehearsalSubject(
        lambda: GPT(CONFIG), next_token_loss, (tokens, tokens), options=Options(example=(tokens, tokens))
    )


def space(fix: str = "", **changes: Any) -> PlanSpace:
    made = PlanSpace(Plan(dp=None), ranks=4, node=4, batch=BATCH, pieces=4, fixed=parse_fixed(fix))
    return dataclasses.replace(made, **changes)


def found(fix: str, *, limit: float = 80e9, top: int = 1, rehearsals: int = 8, workers: int = 1) -> SearchResult:
    effort = SearchEffort(top, rehearsals, workers)
    *_, result = search(subject(), cluster=CLUSTER, space=space(fix), limit=limit, effort=effort)
    return result


NARROW = "tp=1 schedule=1f1b zero=0 microbatches=2"
REPLICAS = "tp=1 pp=1 microbatches=1 recompute=none"


@cache
def everything(fix: str = NARROW) -> SearchResult:
    return found(fix, top=EVERYTHING)


def test_the_choice_is_the_best_of_all() -> None:
    result = found(NARROW)
    assert result.proven >= 1
    assert result.rehearsals < len(result.candidates) == everything().rehearsals
    assert {one.level for one in everything().candidates.values()} == {EstimateLevel.REHEARSED}
    assert everything().best()[0].plan == result.best()[0].plan


@pytest.mark.grid(Grid({"fix": ("tp=1", "tp_mode=1d sequence_parallel=0")}, heavy=lambda cell: cell["fix"] != "tp=1"))
def test_large_micro_batches_are_not_taken_for_slower_than_they_are(fix: str) -> None:
    """What is counted for few short rows and put many times over is more than many rows take at once."""
    tokens = torch.empty(256, 8, dtype=torch.long, device="meta")
    model = dataclasses.replace(CONFIG, context=8, width=64)
    short = RehearsalSubject(
        lambda: GPT(model), next_token_loss, (tokens, tokens), options=Options(example=(tokens, tokens))
    )
    narrow = space(f"microbatches=1 schedule=1f1b zero=0 {fix}", batch=256)
    cluster, best = parse_cluster("1x4 cpu4"), []
    for top in (1, EVERYTHING):
        effort = SearchEffort(top, rehearsals=EVERYTHING)
        *_, result = search(short, cluster=cluster, space=narrow, limit=80e9, effort=effort)
        best.append(result.best()[0])
    chosen, truly = best
    assert chosen.figures.seconds == truly.figures.seconds


def test_the_rehearsed_figures_decide() -> None:
    best, second, *_ = everything().best()

    def slower(prediction: Prediction) -> PlanFigures:
        figures = figures_of(prediction)
        again = second.figures.seconds if prediction.rehearsal.plan.dp == best.plan.dp else 0.0
        return dataclasses.replace(figures, seconds=figures.seconds + again)

    effort = SearchEffort(top=1, rehearsals=8)
    with PlanSearch(subject(), cluster=CLUSTER, space=space(NARROW), limit=80e9, effort=effort) as searching:
        searching.evaluate = slower
        for _ in searching.run(tiers=False):
            pass
    assert best.plan.dp != second.plan.dp
    assert searching.result.best()[0].plan == second.plan


def test_tokens_are_split_where_there_are_fewer_rows_than_ranks() -> None:
    plans = list(space("tp=1 pp=1", batch=2, tokens=128).plans())
    assert {(plan.dp, plan.cp, plan.context) for plan in plans} == {(2, 2, "auto")}
    assert {plan.cp for plan in space("tp=1 cp=4 context=ring", tokens=128).plans()} == {4}
    assert not list(space("tp=1 pp=1", batch=2).plans())
    tokens = torch.empty(2, CONFIG.context, dtype=torch.long, device="meta")
    short = dataclasses.replace(subject(), batch=(tokens, tokens), options=Options(example=(tokens, tokens)))
    narrow = space(f"{NARROW} recompute=none", batch=2, tokens=CONFIG.context)
    best = []
    for top in (1, EVERYTHING):
        effort = SearchEffort(top, rehearsals=EVERYTHING)
        *_, result = search(short, cluster=CLUSTER, space=narrow, limit=80e9, effort=effort)
        best.append(result.best()[0].plan)
    assert best[0] == best[1]
    assert any(plan.cp == 2 for plan in result.candidates)


def test_a_plan_that_does_not_fit_makes_room_by_tokens_in_place_of_rows() -> None:
    [plan] = space("tp=1 pp=1 zero=0 microbatches=1").plans()
    leaner = [one for one in space("tp=1 pp=1 zero=0", tokens=128).leaner(plan, tiers=False) if one.cp > 1]
    assert [(one.dp, one.cp, one.microbatches) for one in leaner] == [(2, 2, 2)]


def test_the_ranks_of_a_node_may_share_one_copy_of_the_state() -> None:
    plans = {(plan.zero, plan.shards) for plan in space("tp=1 pp=1", ranks=8).plans()}
    assert plans == {(0, 0), (1, 0), (1, 4), (3, 0), (3, 4)}
    assert {(plan.dp, plan.shards) for plan in space("dp=4x2 tp=1", ranks=8).plans()} == {(4 * 2, 2)}
    assert {plan.shards for plan in space("tp=1 pp=1").plans()} == {0}  # one node


def test_fixed_keys_stay_fixed() -> None:
    for plan in space("tp=2 pp=2 schedule=zb-h1").plans():
        assert (plan.tp, plan.pp, plan.dp, plan.schedule) == (2, 2, 1, "zb-h1")


def test_short_rows_may_be_computed_all_at_once() -> None:
    """Without a pipeline: with one, all of a micro-batch wait for it."""
    plans = space("tp=1 zero=0 schedule=1f1b", batch=256).plans()
    counts = {(plan.dp, plan.pp, plan.microbatches) for plan in plans}
    assert {count for dp, pp, count in counts if (dp, pp) == (4, 1)} == {1, 8, 16, 32, 64}
    assert {count for dp, pp, count in counts if (dp, pp) == (2, 2)} == {16, 32, 64, 128}


def test_a_rule_says_where_the_model_is_cut() -> None:
    """As many stages as it names; and where each begins is where the plan is rehearsed."""
    late = space(
        "tp=1 dp=2 zero=0 microbatches=2 schedule=1f1b", begins=lambda stages: ("norm",) if stages == 2 else ()
    )
    assert {plan.pp for plan in space("tp=1").plans()} == {1, 2, 4}
    assert {plan.pp for plan in dataclasses.replace(late, fixed=parse_fixed("tp=1")).plans()} == {1, 2}
    assert parse_fixed("schedule=zb-h1 tp=1") == {"schedule": "zb-h1", "tp": 1}
    *_, result = search(subject(), cluster=CLUSTER, space=late, limit=80e9, effort=SearchEffort(top=1))
    assert [one.at for one in result.best()] == [("norm",)]


def test_every_plan_of_a_space_is_different() -> None:
    plans = list(space().plans())
    assert len(set(plans)) == len(plans)
    assert all(plan == plan.resolve(4) for plan in plans)
    assert {plan.tp_mode for plan in plans} == {"1d", "2d"}
    assert {plan.schedule for plan in plans if plan.pp > 1} == {
        "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipev"
    }  # fmt: skip
    assert {plan.recompute for plan in plans} == {"none"}


def test_a_model_that_reads_values_is_refused_with_the_reason() -> None:
    class Looks(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if bool((x > 0).all()) else -x)

    looks = RehearsalSubject(lambda: Looks(4, 4), lambda output, _: (output.sum(), 8), torch.ones(BATCH, 4))
    *_, result = search(looks, cluster=CLUSTER, space=space("tp=1 pp=1"), limit=80e9, effort=SearchEffort())
    assert result.candidates
    assert all("have no values" in one.refused for one in result.candidates.values())


def test_what_tp_cannot_split_costs_no_rehearsals() -> None:
    class Residual(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = torch.nn.GroupNorm(2, 8), torch.nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = x + self.conv(self.norm(x))
            return y

    images = torch.empty(BATCH, 8, 16, 16)
    network = RehearsalSubject(lambda: torch.nn.Sequential(Residual(), Residual()), lambda y, _: (y.sum(), 8), images)
    *_, result = search(network, cluster=CLUSTER, space=space("pp=1"), limit=80e9, effort=SearchEffort(1, rehearsals=3))
    assert result.best()[0].plan.tp == 1
    *_, result = search(network, cluster=CLUSTER, space=space("tp=2 pp=1"), limit=80e9, effort=SearchEffort())
    assert result.rehearsals == 0
    assert all("found no role" in one.refused for one in result.candidates.values())


def test_what_a_model_holds_between_its_blocks_may_go_where_the_batch_is() -> None:
    """As transformers' rotary frequencies do; the batch may have values, as that of a job has."""

    class Turned(GPT):
        def __init__(self) -> None:
            super().__init__(CONFIG)
            self.register_buffer("turns", torch.ones(CONFIG.width))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            turns = self.get_buffer("turns").to(device=x.device, dtype=torch.float)
            for block in self.blocks:
                x = block(x * turns)
            logits: torch.Tensor = self.head(self.norm(x))
            return logits

    tokens = torch.zeros(BATCH, CONFIG.context, dtype=torch.long)
    turned = RehearsalSubject(Turned, next_token_loss, (tokens, tokens), options=Options(example=(tokens, tokens)))
    narrow = space("tp=1 dp=2 zero=0 schedule=1f1b microbatches=2")
    *_, result = search(turned, cluster=CLUSTER, space=narrow, limit=80e9, effort=SearchEffort())
    assert [one.plan.pp for one in result.best()] == [2]


def test_a_reason_is_listed_once_for_all_plans_that_it_refuses() -> None:
    result = SearchResult(limit=1.0)
    for ranks, zero in ((4, 0), (4, 1), (8, 0)):
        plan = Plan.parse(f"dp=2 tp={ranks} zero={zero}")
        cut = f"{plan} partition=params"
        message = f"blocks.0 has 2 heads, and '{cut}' splits them over {ranks} ranks: they are fewer. Nearest: tp=2"
        result.note(Candidate(plan, EstimateLevel.REHEARSED, PlanFigures(seconds=float(ranks + zero)), refused=message))
    parts = "found no role for these parameters:\n  up.weight  (4, 4)  (why)\n  up.bias  (4)\nState them in the rules"
    result.note(Candidate(Plan.parse("dp=3 tp=2"), EstimateLevel.REHEARSED, refused=parts))
    heads, unplaced = lost_table(result, top=1)[1:]
    reason = "refused: blocks.0 has 2 heads, and the plan splits them over 4 ranks: they are fewer"
    assert heads == ("3", reason, "", "", "dp=2 tp=4")
    assert unplaced[:2] == ("1", "refused: found no role for these parameters: up.weight (4, 4) (why)")


def test_an_unknown_key_is_refused_as_a_plan_refuses_it() -> None:
    with pytest.raises(PlanError, match="unknown plan key 'tpp'; did you mean tp"):
        parse_fixed("tpp=2")


def test_plans_that_do_not_fit_make_room_for_leaner_ones() -> None:
    roomy = min(one.figures.memory for one in everything(REPLICAS).best())
    result = found(REPLICAS, limit=roomy - 1)
    best = result.best()[0]
    assert best.figures.memory < roomy
    assert best.plan.zero >= 2
    assert any(row[1] == FULL for row in lost_table(result, top=1))


def test_a_plan_that_keeps_less_may_be_quicker() -> None:
    """ZeRO 1 gathers at the end of a step, where nothing is left to compute beside it; ZeRO 3 does not."""
    best = {one.plan.zero: one.figures for one in everything(REPLICAS).best()}
    assert best[3].seconds < best[1].seconds
    assert best[1].memory < best[0].memory
    assert found(REPLICAS, limit=best[0].memory - 1).best()[0].plan.zero == 3


def test_where_nothing_fits_the_devices_tiers_are_tried() -> None:
    result = found("tp=1 pp=1 microbatches=1 zero=0 recompute=full", limit=1e6)
    assert not result.best()
    assert any(one.plan.offload != "none" for one in result.candidates.values())


def test_nothing_slower_than_the_best_is_called_best() -> None:
    result = everything()
    rows = best_table(result, top=2)
    assert [row[-1] for row in rows[1:]] == [str(one.plan) for one in result.best()[:2]]
    seconds = [one.figures.seconds for one in result.best()]
    assert seconds == sorted(seconds)
    lost = lost_table(result, top=2)[1:]
    assert sum(int(plans) for plans, *_ in lost) + 2 == len(result.candidates)
    assert not any(least.startswith("-") for _, _, least, *_ in lost)


def test_what_the_real_code_refuses_is_refused_in_its_words() -> None:
    two = dataclasses.replace(subject(), model=lambda: GPT(dataclasses.replace(CONFIG, heads=2)))
    fix = "pp=1 dp=1 tp=4 tp_mode=1d sequence_parallel=0 microbatches=8"
    *_, result = search(two, cluster=CLUSTER, space=space(fix), limit=80e9, effort=SearchEffort())
    (refused,) = result.candidates.values()
    with pytest.raises(ValueError, match="heads") as real:
        rehearse(two, plan=refused.plan, ranks=4, device="cuda")
    assert refused.refused == str(real.value)
    assert lost_table(result, top=1)[1][1].startswith("refused: ")


def test_workers_return_the_outcome_of_each_piece_of_work() -> None:
    workers = ForkedWorkers(2)
    workers.start("one", work=lambda: 1)
    workers.start("none", work=lambda: 1 // 0)
    assert not workers.free
    workers.start("gone", work=lambda: os._exit(3))
    outcomes: dict[Any, Any] = {}
    while workers.busy:
        outcomes |= dict(workers.finished())
    assert outcomes["one"] == 1
    assert isinstance(outcomes["none"], ZeroDivisionError)
    assert str(outcomes["gone"]) == "a worker process ended with exit code 3"
    workers.close()


@pytest.mark.processes
def test_work_runs_in_a_fork_of_a_process_with_threads() -> None:
    """libgomp's are gone in a fork, and a kernel that is divided among them would wait for them for ever."""
    script = """
import torch
from meshwise.planner.plan_search import ForkedWorkers

torch.set_num_threads(2)
x = torch.ones(2, 4, 512, 32)
work = lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x).sum().item()
here, workers = work(), ForkedWorkers(2)
workers.start("it", work=work)
assert workers.finished() == [("it", here)]
"""
    status, _, errors = WarmCommand("-c", script).end()
    assert status == 0, errors
