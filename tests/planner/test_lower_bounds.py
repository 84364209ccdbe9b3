"""A bound is one: never above what the rehearsal of the same plan says, in time and in memory."""

import dataclasses
import functools
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from grid import Grid
from meshwise.engine.parallelize import Options
from meshwise.model.deferred_init import shapes_of
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import Plan
from meshwise.planner.layer_profile import LayerProfile, ModelPieces, ProfileKey, profile_layers
from meshwise.planner.lower_bound import PlanFigures, bound
from meshwise.planner.plan_search import Candidate, figures_of, prediction_of
from meshwise.reference.gpt import GPT, GPTConfig, next_token_loss
from meshwise.simulate.cluster import parse_cluster
from meshwise.simulate.rehearsal import Rehearsal, RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import predict
from simulate.subjects import mixture_subject

CONFIG = GPTConfig(vocabulary=512, context=256, layers=2, heads=8, width=1024)
SHIPPED = parse_cluster("2x4 h100")
CLUSTER = dataclasses.replace(SHIPPED, device=dataclasses.replace(SHIPPED.device, own=0.0))
BATCH = 16

PLANS = (
    "dp=8 zero=1 precision=bf16 overlap_gather=1",
    "dp=4 tp=2 sequence_parallel=1 zero=3 precision=bf16 microbatches=2",
    "dp=2 tp=4 tp_mode=2d",
    "dp=2x4 zero=3 precision=bf16",
    "dp=8 wire=int8 precision=bf16",
    "dp=8 zero=3 hpz=4 gather=int8 precision=bf16 microbatches=2",
    "dp=4 cp=2 zero=3 precision=bf16 microbatches=2",
    "dp=4 cp=2 context=ulysses zero=3 precision=bf16",
    "pp=2 dp=2x2 zero=2 microbatches=4 precision=bf16 wire=fp32 recompute=full",
    "pp=2 dp=4 virtual_stages=2 schedule=interleaved microbatches=4",
    "pp=2 dp=4 zero=3 microbatches=4 precision=bf16",
    "pp=4 dp=2 offload=optimizer:cpu precision=bf16 microbatches=2 schedule=zb-h1",
)
OTHERS = (
    "pp=2 dp=2 tp=2 schedule=dualpipev virtual_stages=2 microbatches=4 zero=3",
    "dp=8 zero=1 precision=bf16",
    "pp=2 dp=4 zero=2 microbatches=4 precision=bf16 overlap_gather=1",
    "dp=8 zero=3 precision=bf16 microbatches=2",
    "dp=2 cp=4 zero=3 precision=bf16 microbatches=2",
    "cp=8 context=ulysses zero=3 precision=bf16",
    "pp=2 dp=2x2 zero=2 microbatches=4 precision=bf16",
    "cp=2 dp=2 pp=2 zero=1 microbatches=2",
    "pp=4 dp=2 microbatches=4 precision=bf16 wire=fp32",
    "pp=4 dp=2 zero=2 microbatches=4 recompute=full precision=bf16",
)
"""Of keys that the plans before have too."""


@cache
def subject() -> RehearsalSubject:
    tokens = torch.empty(BATCH, CONFIG.context, dtype=torch.long, device="meta")
    batch = (tokens, tokens)
    return RehearsalSubject(lambda: GPT(CONFIG), next_token_loss, batch, options=Options(example=batch))


@cache
def pieces() -> ModelPieces:
    found = ModelPieces.of(subject(), source=shapes_of(subject().model, seed=0))
    assert found is not None
    return found


@cache
def profile(key: ProfileKey) -> LayerProfile:
    return profile_layers(subject(), pieces=pieces(), key=key, cluster=CLUSTER)


def cut(plan: Plan) -> tuple[str, ...]:
    stages = plan.pp * plan.virtual_stages
    return tuple(pieces().names[number * pieces().count // stages] for number in range(1, stages))


@cache
def rehearsal(text: str) -> Rehearsal:
    plan = Plan.parse(text)
    options = dataclasses.replace(subject().options, cut=CutOptions(at=cut(plan)))
    return rehearse(dataclasses.replace(subject(), options=options), plan=plan, ranks=8, device="cuda")


def rehearsed(text: str) -> PlanFigures:
    return figures_of(predict(rehearsal(text), cluster=CLUSTER))


def least(text: str, way: Callable[[ProfileKey], ProfileKey] = lambda own: own, *, exact: bool = False) -> PlanFigures:
    plan = Plan.parse(text)
    own = ProfileKey.of(plan, batch=BATCH, pieces=pieces().count)
    found = profile(way(own))
    found = found if found.key == own else found.scaled(own)
    return bound(plan, profile=found, cut=pieces().stages(cut(plan)), cluster=CLUSTER, exact=exact)


def undivided(own: ProfileKey) -> ProfileKey:
    plan = Plan(dp=1, pp=own.plan.pp, precision=own.plan.precision, partition="params")
    return ProfileKey(plan, BATCH)


@pytest.mark.grid(Grid({"text": (*PLANS, *OTHERS)}, heavy=lambda cell: cell["text"] in OTHERS))
def test_no_bound_is_above_the_rehearsal(text: str) -> None:
    truth = rehearsed(text)
    for figures in (least(text, undivided), least(text), least(text, exact=True)):
        assert figures.seconds <= truth.seconds * (1 + 1e-9)
        assert figures.memory <= truth.memory


@pytest.mark.grid(
    Grid(
        {"text": ("dp=8 ep=8 precision=bf16", "dp=4 tp=2 ep=8 etp=1 zero=1", "dp=8 ep=8"), "width": (CONFIG.width, 32)},
        exists=lambda cell: (cell["text"] == "dp=8 ep=8") == (cell["width"] == 32),
        heavy=lambda cell: "bf16" in cell["text"],
    )
)
def test_no_bound_of_a_mixture_over_nodes_is_above_the_rehearsal(text: str, width: int) -> None:
    """The narrow model takes as long as the host needs to launch its operations."""
    plan, mixture = Plan.parse(text), mixture_subject(rows=BATCH, context=CONFIG.context, width=width)
    found = ModelPieces.of(mixture, source=shapes_of(mixture.model, seed=0))
    assert found is not None
    key = ProfileKey.of(plan, batch=BATCH, pieces=found.count)
    costs = profile_layers(mixture, pieces=found, key=key, cluster=CLUSTER)
    truth = figures_of(predict(rehearse(mixture, plan=plan, ranks=8, device="cuda"), cluster=CLUSTER))
    figures = bound(plan, profile=costs, cut=[range(found.count)], cluster=CLUSTER, exact=True)
    assert 0.9 * truth.seconds < figures.seconds <= truth.seconds * (1 + 1e-9)
    assert figures.memory <= truth.memory


TWO_PARTS = ("zb-h1", "zb-v virtual_stages=2", "dualpipev virtual_stages=2")


@pytest.mark.grid(Grid({"schedule": TWO_PARTS}, heavy=lambda cell: cell["schedule"] != TWO_PARTS[0]))
def test_a_backward_in_two_parts_is_bounded_where_products_are_slow(schedule: str) -> None:
    """The first stage has none: a piece that took longer in two parts than in one would be counted too high there."""
    text = f"pp=2 dp=2 tp=2 schedule={schedule} microbatches=4"
    peak = {dtype: rate / 1000 for dtype, rate in CLUSTER.device.peak.items()}
    slow = dataclasses.replace(CLUSTER, device=dataclasses.replace(CLUSTER.device, peak=peak))
    key = ProfileKey.of(Plan.parse(text), batch=BATCH, pieces=pieces().count)
    own = profile_layers(subject(), pieces=pieces(), key=key, cluster=slow)
    truth = figures_of(predict(rehearsal(text), cluster=slow)).seconds
    for exact in (False, True):
        stages = pieces().stages(cut(Plan.parse(text)))
        figures = bound(Plan.parse(text), profile=own, cut=stages, cluster=slow, exact=exact)
        assert 0.5 * truth < figures.seconds <= truth * (1 + 1e-9)


class Classes(nn.Module):
    """torch's own layers, thin."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(64, 32), nn.Embedding(16, 32)
        layer = functools.partial(nn.TransformerEncoderLayer, 32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64)
        self.register_buffer("at", torch.arange(16), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(self.at)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def thin_gpt(layers: int = 3) -> nn.Module:
    return GPT(GPTConfig(vocabulary=128, context=16, layers=layers, heads=4, width=64))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "classes": Classes,
    "gpt": thin_gpt,
    "joined": functools.partial(thin_gpt, layers=18),
}
THIN = Grid(
    {"text": ("dp=4", "dp=4 recompute=full", "dp=2 tp=2", "tp=4 sequence_parallel=1"), "thin": tuple(MODELS)},
    strength=1,
    heavy=lambda cell: cell["text"] in ("dp=4", "dp=2 tp=2"),
)


@pytest.mark.grid(THIN)
def test_many_thin_micro_batches_are_bounded_where_the_host_takes_its_time(text: str, thin: str) -> None:
    """Any operation that a profile does beside the model's own would tell.

    Blocks that may be in one unit copy their gradients together, and a bound counts none of these copies."""
    model, least = MODELS[thin], 0.94 if thin == "joined" else 0.98
    plan, cluster = Plan.parse(f"{text} microbatches=64"), parse_cluster("1x4 h100")
    tokens = torch.empty(256, 16, dtype=torch.long, device="meta")
    short = RehearsalSubject(model, next_token_loss, (tokens, tokens), options=Options(example=(tokens, tokens)))
    found = ModelPieces.of(short, source=shapes_of(model, seed=0))
    assert found is not None
    own = profile_layers(short, pieces=found, key=ProfileKey.of(plan, batch=256, pieces=found.count), cluster=cluster)
    figures = bound(plan, profile=own, cut=found.stages(()), cluster=cluster, exact=True)
    truth = figures_of(predict(rehearse(short, plan=plan, ranks=4, device="cuda"), cluster=cluster))
    assert least * truth.seconds < figures.seconds <= truth.seconds * (1 + 1e-9)


@pytest.mark.parametrize("zero", [0, 1])
def test_where_nothing_overlaps_the_reduction_is_added(zero: int) -> None:
    """But what the host only has to start goes on meanwhile."""
    text = f"dp=8 zero={zero} precision=bf16 wire=fp32 microbatches=2"
    own = profile(ProfileKey.of(Plan.parse(text), batch=BATCH, pieces=pieces().count))
    found = []
    for launch in (2 * CLUSTER.device.launch, 0.0):  # the host takes longer than the device, or no time
        device = dataclasses.replace(CLUSTER.device, launch=launch)
        for overlap in (True, False):
            cluster = dataclasses.replace(CLUSTER, device=device, overlap=overlap)
            truth = figures_of(predict(rehearsal(text), cluster=cluster)).seconds
            figures = bound(Plan.parse(text), profile=own, cut=pieces().stages(()), cluster=cluster, exact=True)
            assert 0.8 * truth < figures.seconds <= truth * (1 + 1e-9)
            found.append(figures.seconds)
    late, late_too, during, after = found
    assert late_too == late
    assert after > during


SHARED = (
    "dp=8 zero=1",
    "dp=8 zero=3 microbatches=2",
    "pp=2 dp=4 zero=2 microbatches=4",
    "dp=4 tp=2 zero=1 microbatches=2",
    "pp=2 dp=2 tp=2 zero=2 microbatches=4",
)


@pytest.mark.grid(Grid({"text": SHARED}, heavy=lambda cell: cell["text"] not in SHARED[1:3]))
def test_ranks_of_one_host_share_what_simulate_has_them_share(text: str) -> None:
    host, plan = parse_cluster("1x8 cpu4"), Plan.parse(text)
    chosen = prediction_of(subject(), candidate=Candidate(plan, at=cut(plan)), cluster=host)
    options = dataclasses.replace(subject().options, cut=CutOptions(at=cut(plan)))
    shared = rehearse(dataclasses.replace(subject(), options=options), plan=plan, ranks=8, shared=True)
    truth = figures_of(predict(shared, cluster=host))
    assert figures_of(chosen) == truth
    own = profile_layers(
        subject(), pieces=pieces(), key=ProfileKey.of(plan, batch=BATCH, pieces=pieces().count), cluster=host
    )
    found = bound(plan, profile=own, cut=pieces().stages(cut(plan)), cluster=host, exact=True)
    assert found.seconds <= truth.seconds * (1 + 1e-9)
    assert found.memory <= truth.memory


def test_what_is_reduced_behind_a_pipeline_is_a_wait_and_no_bubble() -> None:
    text = "pp=2 dp=4 microbatches=4"
    own = profile(ProfileKey.of(Plan.parse(text), batch=BATCH, pieces=pieces().count))
    at = pieces().stages(cut(Plan.parse(text)))
    quick, slow = (
        dataclasses.replace(CLUSTER.inside, collectives={"all_reduce": ((1.0, rate),)}) for rate in (1e15, 1e9)
    )
    before, after = (
        bound(Plan.parse(text), profile=own, cut=at, cluster=dataclasses.replace(CLUSTER, inside=inside), exact=True)
        for inside in (quick, slow)
    )
    truth = figures_of(predict(rehearsal(text), cluster=dataclasses.replace(CLUSTER, inside=slow)))
    assert after.bubble == pytest.approx(before.bubble, rel=1e-6)
    assert 0.9 * truth.exposed["dp"] < after.exposed["dp"] <= truth.exposed["dp"]


def test_bounds_are_near() -> None:
    """What they are good for: on most plans, little is left for the rehearsal to find."""
    times = sorted(least(text, exact=True).seconds / rehearsed(text).seconds for text in PLANS)
    sizes = sorted(least(text, exact=True).memory / rehearsed(text).memory for text in PLANS)
    assert times[len(times) // 2] > 0.9
    assert sizes[len(sizes) // 2] > 0.75


def test_stages_that_are_whole_count() -> None:
    """Under ZeRO 3 until their last action, and their gradients until they are reduced."""
    text = "pp=2 dp=4 zero=3 microbatches=4 precision=bf16"
    assert 0.7 < least(text, exact=True).memory / rehearsed(text).memory <= 1


def test_a_smaller_model_has_the_same_profile() -> None:
    """Of five blocks three are run, and the others cost what one of them does."""
    deep = dataclasses.replace(CONFIG, layers=5)
    five = dataclasses.replace(subject(), model=lambda: GPT(deep))
    found = ModelPieces.of(five, source=shapes_of(five.model, seed=0))
    assert found is not None
    assert found.names[2:7] == tuple(f"blocks.{number}" for number in range(5))
    assert found.like == (0, 1, 2, 3, 3, 3, 4, 5, 6)
    assert len(found.model.get_submodule("blocks")) == 3  # type: ignore[arg-type]


def test_what_the_first_of_the_blocks_does_is_not_counted_for_all() -> None:
    """With sequence parallelism it splits the tokens, and gathers their gradient."""
    deep = dataclasses.replace(subject(), model=lambda: GPT(dataclasses.replace(CONFIG, layers=12)))
    found = ModelPieces.of(deep, source=shapes_of(deep.model, seed=0))
    assert found is not None
    plan = Plan.parse("tp=4 sequence_parallel=1 precision=bf16")
    own = profile_layers(deep, pieces=found, key=ProfileKey.of(plan, batch=BATCH, pieces=found.count), cluster=CLUSTER)
    figures = bound(plan, profile=own, cut=found.stages(()), cluster=CLUSTER, exact=True)
    truth = figures_of(predict(rehearse(deep, plan=plan, ranks=4, device="cuda"), cluster=CLUSTER))
    assert 0.8 * truth.exposed["tp"] < figures.exposed["tp"] <= truth.exposed["tp"]
