"""Test that the planner chooses `ep` for mixtures, by bounds that hold, and that a rehearsal counts an imbalance."""

import dataclasses
from functools import cache

import pytest
import torch

from grid import Grid
from meshwise.engine.parallelize import Options
from meshwise.model.deferred_init import shapes_of
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import Plan, PlanError
from meshwise.planner.layer_profile import LayerProfile, ModelPieces, ProfileKey, profile_layers
from meshwise.planner.lower_bound import PlanFigures, bound
from meshwise.planner.plan_search import figures_of
from meshwise.planner.plan_space import UNDIVIDED, PlanSpace, parse_fixed
from meshwise.reference import MixtureConfig, MixtureGPT, next_token_loss
from meshwise.simulate.cluster import parse_cluster
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import predict

BATCH = 16
SHIPPED = parse_cluster("1x4 h100")
CLUSTER = dataclasses.replace(SHIPPED, device=dataclasses.replace(SHIPPED.device, own=0.0))


def subject(**options: object) -> RehearsalSubject:
    tokens = torch.empty(BATCH, 512, dtype=torch.long, device="meta")
    config = MixtureConfig(vocabulary=64, context=512, layers=2, heads=8, width=1024, experts=8)
    example = Options(example=(tokens, tokens), **options)  # type: ignore[arg-type]
    return RehearsalSubject(lambda: MixtureGPT(config), next_token_loss, (tokens, tokens), options=example)


@cache
def pieces() -> ModelPieces:
    found = ModelPieces.of(subject(), source=shapes_of(subject().model, seed=0))
    assert found is not None
    return found


@cache
def profile(key: ProfileKey) -> LayerProfile:
    return profile_layers(subject(), pieces=pieces(), key=key, cluster=CLUSTER)


def rehearsed(text: str, *, cut: CutOptions, **options: object) -> PlanFigures:
    rehearsal = rehearse(subject(cut=cut, **options), plan=Plan.parse(text), ranks=4, device="cuda")
    return figures_of(predict(rehearsal, cluster=CLUSTER))


PLANS = (
    "dp=4 ep=4 zero=3",
    "dp=4 ep=2 zero=1",
    "dp=2x2 ep=2 zero=3",
    "dp=2x2 ep=4 zero=1",
    "dp=4 hpz=2 ep=2 zero=3",
    "dp=2 tp=2 ep=2 etp=2 zero=2",
    "pp=2 dp=2 ep=2 microbatches=2",
    "dp=4",
)


@pytest.mark.grid(Grid({"text": PLANS}, heavy=lambda cell: cell["text"] in ("dp=4 ep=4 zero=3", "dp=4")))
def test_no_bound_of_a_mixture_is_above_the_rehearsal(text: str) -> None:
    plan, names = Plan.parse(text), pieces().names
    own = ProfileKey.of(plan, batch=BATCH, pieces=pieces().count)
    undivided = ProfileKey(dataclasses.replace(own.plan, **{**UNDIVIDED, "dp": 1}), BATCH)
    at = tuple(names[number * len(names) // plan.pp] for number in range(1, plan.pp))
    truth = rehearsed(text, cut=CutOptions(at=at))
    for found, exact in ((profile(undivided).scaled(own), False), (profile(own), False), (profile(own), True)):
        figures = bound(plan, profile=found, cut=pieces().stages(at), cluster=CLUSTER, exact=exact)
        assert 0 < figures.seconds <= truth.seconds * (1 + 1e-9)
        assert 0 < figures.memory <= truth.memory


def test_the_planner_tries_expert_parallelism_of_mixtures_alone() -> None:
    space = PlanSpace(Plan(dp=None), ranks=8, node=4, batch=8, pieces=4, experts=16)
    flat = (plan for plan in space.plans() if plan.pp == 1 and plan.tp_mode == "1d")
    assert {(plan.dp, plan.tp, plan.ep, plan.etp) for plan in flat} == {
        *((8, 1, ep, 1) for ep in (1, 4, 8)),
        *((4, 2, ep, 1) for ep in (1, 4, 8)),
        *((2, 4, ep, 1) for ep in (1, 4, 8)),
        *((4, 2, ep, 2) for ep in (1, 4)),
        *((2, 4, ep, 4) for ep in (1, 2)),
    }
    assert {(plan.dp, plan.shards, plan.ep) for plan in space.plans() if plan.pp == plan.tp == 1 and plan.shards} == {
        (8, 4, ep) for ep in (1, 4, 8)
    }
    assert {(plan.ep, plan.etp) for plan in dataclasses.replace(space, experts=1).plans()} == {(1, 1)}
    assert {plan.etp for plan in dataclasses.replace(space, fixed=parse_fixed("tp=4 etp=2")).plans()} == {2}
    assert {plan.ep for plan in dataclasses.replace(space, fixed=parse_fixed("dp=8 ep=2")).plans()} == {2}
    assert {plan.ep for plan in dataclasses.replace(space, fixed=parse_fixed("ep=4")).plans()} == {4}


def test_an_imbalance_takes_memory_and_time_until_all_tokens_come_to_one_rank() -> None:
    found = [rehearsed("dp=4 ep=4", cut=CutOptions(), expert_imbalance=factor) for factor in (1.0, 2.0, 4.0, 8.0)]
    memory, seconds = [one.memory for one in found], [one.seconds for one in found]
    assert memory[:3] == sorted(set(memory))
    assert seconds[:3] == sorted(set(seconds))
    assert (memory[3], seconds[3]) == (memory[2], seconds[2])
    assert rehearsed("dp=4", cut=CutOptions(), expert_imbalance=2.0) == rehearsed("dp=4", cut=CutOptions())


def test_a_chunk_takes_less_memory_and_more_time_in_a_rehearsal() -> None:
    whole, chunked = (rehearsed(f"dp=4 ep=4{more}", cut=CutOptions()) for more in ("", " chunk=512"))
    assert chunked.memory < whole.memory
    assert chunked.seconds > whole.seconds


def test_copies_of_experts_take_memory_in_a_rehearsal() -> None:
    plain, copied = (rehearsed(f"dp=4 ep=4{more}", cut=CutOptions()) for more in ("", " replicate=2"))
    copies = 2 * 2 * (2 * 1024 * 4096 * 4)  # layers, copies, bytes of two matrices
    assert 0.99 * copies < copied.memory - plain.memory < 1.5 * copies


def test_parts_of_a_dispatch_travel_beside_computation_in_forward_and_backward() -> None:
    whole, parts = (rehearsed(f"dp=4 ep=4{more}", cut=CutOptions()) for more in ("", " dispatch_parts=4"))
    assert parts.exposed["dp"] < whole.exposed["dp"] / 2  # a half each would be left if only one of the two overlapped


def test_other_grids_than_1d_name_the_experts_that_they_cannot_split() -> None:
    with pytest.raises(PlanError, match=r"tp_mode=2d splits hidden states, and blocks.0.mlp.experts .* tp_mode=1d"):
        rehearse(subject(), plan="tp=4 tp_mode=2d", ranks=4)
