"""Stages that begin inside of a block: where they can, that they are the model all the same, and when they are chosen.

Trained under everything that has to do with blocks: two steps of AdamW with clipping, float64, with dropout; the
loss, norm, every gradient and every parameter to 1e-9 of one process. `make grid` runs the whole product."""

import functools
import gc
import random
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from grid import Grid
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.pipeline.cut.model_cut import CutOptions, CutRequest, cut_model
from meshwise.pipeline.cut.probe import probe
from meshwise.pipeline.cut.probe_result import CallCost, CutError, ProbeResult, inner_modules, with_typical_costs
from meshwise.pipeline.schedules.named_schedules import make_schedule
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, run
from pipeline.oracle import TARGETS, TOKENS, is_the_model
from pipeline.oracle import gpt as small_gpt
from pipeline.oracle import lm as small_lm
from pipeline.subjects import TiedDecoder

WIDTH, HEADS, VOCABULARY, LENGTH = 8, 2, 16, 4


class Block(nn.Module):
    """One whose matrices are its own modules, with attention and dropout between them, and a sum in place."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.before, self.again = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = self.project(y).add_(functional.dropout(x, self.dropout, self.training))
        return x + functional.dropout(self.down(functional.gelu(self.up(self.again(x)))), self.dropout, self.training)


class Decoder(TiedDecoder):
    """Blocks between an embedding and a head that has its matrix."""

    def __init__(self, *, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__(functools.partial(Block, dropout), layers=layers, vocabulary=VOCABULARY, width=WIDTH)


# ---- the cut -----------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module) -> Tensor:
    tokens = TOKENS[:, :LENGTH] % VOCABULARY
    return next_token_loss(model(tokens), (tokens, TARGETS[:, :LENGTH] % VOCABULARY))[0]


PARTS = ("before", "qkv", "project", "again", "up", "down")


@pytest.mark.parametrize("part", PARTS[1:])
def test_a_stage_may_begin_at_any_module_of_a_block(part: str) -> None:
    model = Decoder().double()
    at = (f"blocks.0.{part}", f"blocks.1.{part}")
    cut = cut_model(model, stages=3, call=loss_of, request=CutRequest("params", options=CutOptions(at=at)))
    assert cut.split_blocks == ("blocks.0", "blocks.1")
    is_the_model(model, loss_of, cut)


class Carrying(Block):
    """Block that takes arguments called `state` and `module`, as blocks with a memory of tokens do."""

    def forward(self, x: Tensor, *, state: Tensor | None = None, module: float = 1.0) -> Tensor:
        return super().forward(x if state is None else x + state) * module


def test_a_split_block_takes_arguments_of_any_name() -> None:
    class Model(TiedDecoder):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, state=torch.ones(()), module=2.0)
            logits: Tensor = self.head(x)
            return logits

    model = Model(functools.partial(Carrying, 0.0), layers=2, vocabulary=VOCABULARY, width=WIDTH).double()
    cut = cut_model(
        model, stages=2, call=loss_of, request=CutRequest("params", options=CutOptions(at=("blocks.1.up",)))
    )
    assert cut.split_blocks == ("blocks.1",)
    is_the_model(model, loss_of, cut)


def test_several_stages_may_share_a_block() -> None:
    model = Decoder(layers=3).double()
    at = ("blocks.1.before", "blocks.1.project", "blocks.1.down", "blocks.2", "head")
    stages = is_the_model(
        model,
        loss_of,
        cut_model(model, stages=6, call=loss_of, request=CutRequest("params", options=CutOptions(at=at))),
    )
    blocks = [stage.module.get_submodule("blocks.1") for stage in stages]
    kept = [{name for name, _ in block.named_parameters()} for block in blocks]
    names = lambda *modules: {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}  # noqa: E731
    assert kept == [set(), names("before", "qkv"), names("project", "again", "up"), names("down"), set(), set()]
    assert [stage.receives for stage in stages[1:]] == [
        ("blocks.0",),
        ("blocks.0", "blocks.1.qkv"),
        ("blocks.0", "blocks.1.project", "blocks.1.up"),
        ("blocks.1",),
        ("blocks.2",),
    ]


def test_where_it_is_worth_it_blocks_are_opened_and_the_table_says_so() -> None:
    model = small_gpt()
    whole, auto = (
        cut_model(model, stages=3, call=small_lm, request=CutRequest("params", options=CutOptions(how=how)))
        for how in ("blocks", "auto")
    )
    assert whole.split_blocks == ()
    assert auto.imbalance < whole.imbalance * 0.98
    assert all(f"{name} is split: a stage begins inside" in str(auto) for name in auto.split_blocks)
    is_the_model(model, small_lm, auto)
    even = cut_model(
        model, stages=2, call=small_lm, request=CutRequest("params", options=CutOptions(pieces=("blocks.*",)))
    )
    assert even.split_blocks == (), "pieces that were asked for stay whole"


def test_split_blocks_shorten_the_step_of_a_schedule() -> None:
    """Eight blocks and a head are too few for four stages."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=128, context=12, layers=8, heads=HEADS, width=WIDTH))
    schedule = make_schedule("1f1b", pp=4, microbatches=8)
    taken = {}
    for how in ("blocks", "auto"):
        request = CutRequest("time", options=CutOptions(how=how), schedule=schedule)
        cut = cut_model(model, stages=4, call=lambda model: model(TOKENS), request=request)
        costs = [ActionCost(load / 3, load / 3, load / 3) for load in cut.loads]
        taken[how] = clock(schedule, costs=costs).seconds / (sum(cut.loads) * 8 / 4)
    assert taken["auto"] < 0.98 * taken["blocks"]
    assert taken["auto"] < 1.06 * 11 / 8


# ---- blocks that stay whole --------------------------------------------------------------------------------------


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__(0.0)
        self.scale = nn.Parameter(torch.ones(WIDTH))


class Reading(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.down.weight.mean()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))


@pytest.mark.parametrize(
    "block, parts",
    [
        (Block(0.0), PARTS),
        (Scaled(), ()),
        (Reading(0.0), ()),
        (Experts(), ()),
        (nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), ("0", "2")),
        (nn.Linear(4, 4), ()),
    ],
    ids=["whole", "own parameters", "reads", "experts", "sequence", "leaf"],
)
def test_modules_of_a_block_at_which_a_stage_may_begin(block: nn.Module, parts: tuple[str, ...]) -> None:
    found = inner_modules(block)
    assert len(found) == len(parts)
    assert set(found) == set(parts)


class Around(nn.Module):
    """Calls its blocks in some way."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(0.0) for _ in range(2))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


@pytest.mark.parametrize(
    "call",
    [
        lambda block, x: checkpoint(block, x, use_reentrant=False),
        lambda block, x: block(block(x)),
    ],
    ids=["checkpoint", "twice"],
)
def test_a_block_that_runs_twice_or_is_checkpointed_stays_whole(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = Around(call).double()

    def squares(model: nn.Module) -> Tensor:
        x = torch.linspace(-1, 1, 2 * LENGTH * WIDTH).double().reshape(2, LENGTH, WIDTH)
        out: Tensor = model(x.requires_grad_()).square().sum()
        return out

    with pytest.raises(CutError, match=r"a stage cannot begin at 'blocks\.1\.up'"):
        cut_model(model, stages=2, call=squares, request=CutRequest("params", options=CutOptions(at=("blocks.1.up",))))


class Repeating(Block):
    """Checkpoints itself, as layers of Hugging Face transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def test_a_block_that_checkpoints_itself_stays_whole() -> None:
    model = Around(lambda block, x: block(x)).double()
    model.blocks = nn.ModuleList(Repeating(0.0) for _ in range(2)).double()
    call = lambda model: model(torch.ones(2, LENGTH, WIDTH).double())  # noqa: E731
    with pytest.raises(CutError, match=r"a stage cannot begin at 'blocks\.1\.up'"):
        cut_model(model, stages=2, call=call, request=CutRequest("params", options=CutOptions(at=("blocks.1.up",))))


ROLES = {"qkv": "colwise", "project": "rowwise"}


def test_no_stage_begins_between_the_matrices_that_ranks_share_out() -> None:
    model = Decoder().double()
    pairs = {f"blocks.{block}.{name}": role for block in range(2) for name, role in ROLES.items()}
    with pytest.raises(CutError, match=r"a stage cannot begin at 'blocks\.1\.again'"):
        cut_model(
            model,
            stages=2,
            call=loss_of,
            request=CutRequest("params", options=CutOptions(at=("blocks.1.again",)), roles=pairs),
        )
    whole = small_gpt()
    inner = {"blocks.1.attention.qkv": "colwise", "blocks.1.attention.projection": "rowwise"}
    at = CutOptions(at=("blocks.1.mlp_norm",))
    assert cut_model(
        whole, stages=2, call=small_lm, request=CutRequest("params", options=at, roles=inner)
    ).split_blocks == ("blocks.1",)


# ---- training ----------------------------------------------------------------------------------------------------

AT = {
    "decoder": {2: ("blocks.0.again",), 4: ("blocks.0.project", "blocks.0.down", "blocks.1.again")},
    "gpt": {2: ("blocks.0.mlp_norm",), 4: ("blocks.0.mlp_norm", "blocks.1.attention", "blocks.1.mlp")},
}
SPLIT = {"1": "tp=1", "2": "tp=2", "2-tokens": "tp=2 sequence_parallel=1"}

GRID = Grid(
    {
        "model": tuple(AT),
        "schedule": ("1f1b", "zb-h1", "zb-v"),
        "zero": (0, 1, 3),
        "tp": tuple(SPLIT),
        "dp": (1, 2),
        "recompute": ("none", "selective", "full"),
    },
    exists=lambda cell: cell["model"] == "gpt" or cell["tp"] == "1",
    cost=lambda cell: plan_of(**{name: cell[name] for name in cell if name != "model"}).mesh().size,
    strength=1,
)


def plan_of(schedule: str, zero: int, tp: str, dp: int, recompute: str) -> Plan:
    virtual, microbatches = (2, 4) if schedule == "zb-v" else (1, 2)
    words = f"pp=2 dp={dp} zero={zero} {SPLIT[tp]} recompute={recompute} schedule={schedule} virtual_stages={virtual}"
    return Plan.parse(f"{words} microbatches={microbatches} partition=params")


def built(model: str) -> nn.Module:
    if model == "decoder":
        return Decoder(dropout=0.3).double()
    shape = GPTConfig(vocabulary=VOCABULARY, context=LENGTH, layers=2, heads=HEADS, width=WIDTH, dropout=0.3)
    return GPT(shape).double()


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator) for rows in (8, 7)]
    return [(tokens[:, :-1], tokens[:, 1:].clone()) for tokens in drawn]


def options(model: str, stages: int) -> Options:
    return Options(clip_norm=0.5, example=batches()[0], cut=CutOptions(at=AT[model].get(stages, ())))


def trained(world: World, plan: Plan, model: str) -> Any:
    stages = plan.pp * plan.virtual_stages
    trainer = parallelize(
        functools.partial(built, model),
        plan,
        world=world,
        loss=next_token_loss,
        options=options(model, stages),
        lr=1e-2,
    )
    assert trainer.cut is not None
    assert trainer.cut.split_blocks
    steps = outcome(trainer, batches=batches())
    loss = trainer.evaluate(batches()[1:2]).loss
    predicted = trainer.predict(batches()[1]).square().sum()
    trainer.close()
    return steps, {"loss": loss, "predicted": predicted}


@functools.cache
def expected(model: str) -> Any:
    return alone(
        functools.partial(built, model), batches=batches(), loss=next_token_loss, options=options(model, 1), lr=1e-2
    )


@functools.cache
def expected_after(model: str) -> Any:
    """Of the trained model, its loss and logits."""
    return run(1, whole, on="threads", args=(model,))[0]


def whole(world: World, model: str) -> Any:
    trainer = parallelize(
        functools.partial(built, model), "dp=1", world=world, loss=next_token_loss, options=options(model, 1), lr=1e-2
    )
    for batch in batches():
        trainer.step(batch)
    found = {"loss": trainer.evaluate(batches()[1:2]).loss, "predicted": trainer.predict(batches()[1]).square().sum()}
    trainer.close()
    return found


@pytest.mark.grid(GRID)
def test_stages_that_begin_inside_of_blocks_train_like_one_process(
    model: str, schedule: str, zero: int, tp: str, dp: int, recompute: str
) -> None:
    plan = plan_of(schedule, zero, tp, dp, recompute)
    for steps, after in run(plan.mesh().size, trained, on="threads", args=(plan, model)):
        agree(steps, expected(model), bound=1e-9)
        agree(after, expected_after(model), bound=1e-9)


def test_tensors_of_a_timed_run_are_freed() -> None:
    rows = 13  # which no other tensor has
    tokens = torch.zeros(rows, LENGTH, dtype=torch.long)
    cut_model(Decoder(), stages=2, call=lambda model: model(tokens).square().sum())
    gc.collect()
    left = [one for one in gc.get_objects() if type(one) is Tensor and one.shape[:1] == (rows,) and one.requires_grad]
    assert not left


class Kept(nn.Linear):
    """A piece during which the processor does something else."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name that torch gives it)
        time.sleep(0.05)
        return super().forward(input)


def test_time_outside_of_the_thread_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    model, x = nn.Sequential(nn.Linear(2, 2), Kept(2, 2)), torch.ones(1, 2)
    cut = cut_model(model, stages=2, call=lambda model: model(x).sum(), request=CutRequest("time"))
    assert max(cut.loads) < 0.05


def test_a_head_that_runs_once_is_measured_as_blocks_that_run_often() -> None:
    """By the least of their times, of a head three, blocks would seem too small: the more blocks, the smaller."""
    model, x = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)), nn.Linear(2, 1)), torch.ones(1, 2)
    seen = probe(model, call=lambda model: model(x).sum())
    drawn = random.Random(0)

    def restless() -> ProbeResult:
        cost = [CallCost(0.0, drawn.gauss(1.0, 0.1)) for _ in seen.calls]
        steps = tuple(replace(step, cost=one) for step, one in zip(seen.calls, cost, strict=True))
        return replace(seen, calls=steps)

    runs = [[restless() for _ in range(3)] for _ in range(40)]
    works = [[step.cost.work for step in with_typical_costs(seen, runs=some, model=model).calls] for some in runs]
    assert abs(mean(work[-1] for work in works) - mean(work[0] for work in works)) < 0.03
