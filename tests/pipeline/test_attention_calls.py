"""Attention that a block calls itself, not in a module of its own: a stage may begin at that call.

Two blocks are cut at each place that they have, by hand: the stages are the model, they compute together what one
process does, and they train like it under every schedule, to 1e-9 in float64.
"""

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.model.dispatch_modes import TorchDispatchMode
from meshwise.pipeline.cut.model_cut import CutOptions, CutRequest, UncutModules, cut_model
from meshwise.pipeline.cut.partition import CutError
from meshwise.pipeline.cut.probe import probe
from meshwise.pipeline.cut.probe_result import ProbedStep, ProbeResult
from meshwise.pipeline.run.build_stage import make_stage
from meshwise.pipeline.run.stage import StageError
from meshwise.pipeline.schedules import SCHEDULES
from meshwise.plan import Plan
from meshwise.reference import next_token_loss
from meshwise.simulate.prediction import forward_flops
from meshwise.simulate.rehearsal import rehearse
from meshwise.simulate.rehearsal_subject import RehearsalSubject
from meshwise.testing import agree, alone, outcome, run
from pipeline.oracle import is_the_model, run_stages
from pipeline.subjects import TiedDecoder

WIDTH, HEADS, VOCABULARY, LENGTH, ROWS = 12, 4, 16, 5, 4
CALL = "scaled_dot_product_attention"
PARTS = ("before", "qkv", CALL, "project", "again", "up", "down")
PLACES = tuple(f"blocks.{number}.{part}" for number in range(2) for part in PARTS)


class Block(nn.Module):
    """Attention of groups of queries without a module around it, with values wider than queries; it may drop."""

    def __init__(self, dropout: float = 0.0, *, groups: int = 2, wider: int = 1) -> None:
        super().__init__()
        self.dropout, self.groups = dropout, groups
        size = WIDTH // HEADS
        self.sizes = [HEADS * size, groups * size, groups * size * wider]
        self.before, self.again = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, sum(self.sizes)), nn.Linear(WIDTH * wider, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).split(self.sizes, dim=2)
        q = q.unflatten(2, (HEADS, -1)).transpose(1, 2)
        k, v = (part.unflatten(2, (self.groups, -1)).transpose(1, 2) for part in (k, v))
        y = self.attend(q, k, v).transpose(1, 2).flatten(2)
        x = self.project(y).add_(functional.dropout(x, self.dropout, self.training))
        return x + functional.dropout(self.down(functional.gelu(self.up(self.again(x)))), self.dropout, self.training)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropping = self.dropout if self.training else 0.0
        attended: Tensor = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropping, is_causal=True, enable_gqa=self.groups < HEADS
        )
        return attended


class Decoder(TiedDecoder):
    """Two blocks between an embedding and a head that has its matrix."""

    def __init__(self, block: type[Block] = Block, **config: Any) -> None:
        super().__init__(functools.partial(block, **config), layers=2, vocabulary=VOCABULARY, width=WIDTH)


TOKENS = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) * 7 % VOCABULARY


def loss_of(model: nn.Module) -> Tensor:
    return next_token_loss(model(TOKENS), (TOKENS, TOKENS.roll(-1, dims=1)))[0]


def by_hand(*at: str, **more: Any) -> CutRequest:
    return CutRequest("params", where=CutOptions(at=at), **more)


# ---- the stages are the model ------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts products and attentions with what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.endswith("mm") or "scaled_dot_product" in name:
            self.found[name, *(tuple(one.shape) for one in args if isinstance(one, Tensor))] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wider", [1, 2])
@pytest.mark.parametrize("first", PLACES)
def test_stages_that_begin_at_each_two_places_compute_what_the_model_does_and_no_more(first: str, wider: int) -> None:
    model = Decoder(wider=wider).double()
    with Operations() as once:
        loss_of(model).backward()
    model.zero_grad()
    assert any("scaled" in name or name == "aten::bmm" for name, *_ in once.found)
    for second in PLACES[PLACES.index(first) + 1 :]:
        if (first, second) in stages_without_parameters():
            continue
        cut = cut_model(model, stages=3, call=loss_of, wish=by_hand(first, second))
        is_the_model(model, loss_of, cut)
        stages = [make_stage(model, cut=cut, index=index) for index in range(3)]
        with Operations() as together:
            run_stages(stages, loss_of)
        assert together.found == once.found
        model.zero_grad()


def stages_without_parameters() -> list[tuple[str, str]]:
    return [(place, after) for place, after in itertools.pairwise(PLACES) if place.endswith(CALL)]


def test_what_crosses_is_what_attention_is_given_or_what_it_gives() -> None:
    model = Decoder().double()
    cut = cut_model(model, stages=4, call=loss_of, wish=by_hand(f"blocks.0.{CALL}", "blocks.1.qkv", "blocks.1.project"))
    assert cut.crossing[:3] == (
        ("embedding", "blocks.0.qkv"),
        ("blocks.0", "blocks.1.before"),
        ("blocks.0", f"blocks.1.{CALL}"),
    )
    stages = is_the_model(model, loss_of, cut)
    assert not any(CALL in name for stage in stages for name, _ in stage.module.named_modules())


@pytest.mark.parametrize("part", PARTS[1:])
def test_a_block_may_take_a_view_of_what_attention_gives(part: str) -> None:
    model = Decoder(Viewing).double()
    is_the_model(model, loss_of, cut_model(model, stages=2, call=loss_of, wish=by_hand(f"blocks.0.{part}")))
    plan, options = Plan.parse("pp=2 microbatches=2 partition=params"), Options(clip_norm=0.5)
    once = alone(copy.deepcopy(model), batches=batches(), loss=next_token_loss, options=options, lr=1e-2)
    for steps in run(2, trained, on="threads", args=(plan, (f"blocks.0.{part}",), model)):
        agree(steps, once, bound=1e-9)


# ---- what is seen ------------------------------------------------------------------------------------------------


def inner(seen: ProbeResult) -> Iterator[tuple[str, ProbedStep]]:
    return ((step.key, step) for block in seen.steps for step in block.inside)


def test_attention_is_counted_where_it_is_and_the_same_without_values() -> None:
    model = Decoder(groups=HEADS).double()
    seen = probe(model, call=loss_of, opens=True)
    assert [key for key, _ in inner(seen)] == [
        f"blocks.{n}{part}" for n in range(2) for part in (*(f".{part}" for part in PARTS), "")
    ]
    with torch.device("meta"):
        bare = Decoder(groups=HEADS).double()
    counted = dict(inner(probe(bare, call=loss_of, timed=True, opens=True)))
    products = 2 * ROWS * LENGTH**2 * WIDTH
    for number in range(2):
        assert counted[f"blocks.{number}.{CALL}"].took.work == 6 * products
        assert counted[f"blocks.{number}.project"].took.work == 6 * ROWS * LENGTH * WIDTH**2
        assert not any(step.took.between for step in counted.values())


@pytest.mark.parametrize("at", [(PLACES[2],), (PLACES[3],), (PLACES[6],), (PLACES[2], PLACES[6], PLACES[9])])
def test_a_rehearsal_counts_it_once(at: tuple[str, ...]) -> None:
    model, found = Decoder(groups=HEADS), []
    for plan, cut in (("dp=1", ()), (f"pp={1 + len(at)} microbatches=4", at)):
        options = Options(example=batches()[0], cut=CutOptions(at=cut))
        subject = RehearsalSubject(model, next_token_loss, batches()[0], options=options)
        found.append(sum(forward_flops(rehearse(subject, plan=plan, ranks=1 + len(cut)))))
    assert found[0] == found[1]


# ---- where there is no such place --------------------------------------------------------------------------------


class Twice(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(super().attend(q, k, v), k, v)


class Attention(nn.Linear):
    """A matrix, and attention to it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name that torch gives it)
        return super().forward(functional.scaled_dot_product_attention(input, input, input))


class Within(Block):
    """Calls it in a module as well."""

    def __init__(self) -> None:
        super().__init__()
        self.project = Attention(WIDTH, WIDTH)


class Viewing(Block):
    """Counts on how attention lays out what it gives: as the queries are."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = super().attend(q, k, v).transpose(1, 2)
        return y.view(y.size(0), y.size(1), -1).view(y.shape).transpose(1, 2)


class Repeating(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended: Tensor = checkpoint(super().attend, q, k, v, use_reentrant=False)
        return attended


class Named(Block):
    """Has a module of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled_dot_product_attention = nn.Identity()


@pytest.mark.parametrize("block", [Twice, Within, Named, Repeating])
def test_attention_that_is_not_a_call_of_its_own_is_computed_with_what_is_after_it(block: type[Block]) -> None:
    model = Decoder(block).double()
    with pytest.raises(CutError, match=rf"a stage cannot begin at 'blocks\.1\.{CALL}'"):
        cut_model(model, stages=2, call=loss_of, wish=by_hand(f"blocks.1.{CALL}"))
    for part in ("project", "again"):
        is_the_model(model, loss_of, cut_model(model, stages=2, call=loss_of, wish=by_hand(f"blocks.1.{part}")))


def test_nor_is_there_one_where_ranks_share_its_heads() -> None:
    pairs = UncutModules(
        frozenset({"blocks.0.qkv", "blocks.1.qkv"}), frozenset({"blocks.0.project", "blocks.1.project"})
    )
    with pytest.raises(CutError, match="a stage cannot begin at"):
        cut_model(Decoder().double(), stages=2, call=loss_of, wish=by_hand(f"blocks.1.{CALL}", pairs=pairs))


class Sometimes(Block):
    """Attends in training alone."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v) if self.training else q


def test_a_block_that_then_does_without_it_is_an_error() -> None:
    model = Decoder(Sometimes, groups=HEADS).double()
    cut = cut_model(model, stages=2, call=loss_of, wish=by_hand(f"blocks.0.{CALL}"))
    stage = make_stage(model.eval(), cut=cut, index=0)
    with pytest.raises(StageError, match=rf"blocks\.0\.project runs where blocks\.0\.{CALL} was due"):
        stage.run(loss_of, received={})


# ---- training ----------------------------------------------------------------------------------------------------

GRID = Grid(
    {
        "part": PARTS,
        "schedule": tuple(SCHEDULES),
        "zero": (0, 1, 3),
        "dp": (1, 2),
        "recompute": ("none", "selective", "full"),
    },
    cost=lambda cell: 2.0 * cell["dp"],
)


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator) for rows in (8, 7)]
    return [(tokens[:, :-1], tokens[:, 1:].clone()) for tokens in drawn]


def built() -> nn.Module:
    return Decoder(dropout=0.3).double()


@functools.cache
def expected() -> Any:
    return alone(built, batches=batches(), loss=next_token_loss, options=Options(clip_norm=0.5), lr=1e-2)


def trained(world: World, plan: Plan, at: tuple[str, ...], model: Any) -> Any:
    options = Options(clip_norm=0.5, example=batches()[0], cut=CutOptions(at=at))
    trainer = parallelize(copy.deepcopy(model), plan, world=world, loss=next_token_loss, options=options, lr=1e-2)
    steps = outcome(trainer, batches=batches())
    trainer.close()
    return steps


@pytest.mark.grid(GRID)
def test_stages_that_begin_at_attention_train_like_one_process(
    part: str, schedule: str, zero: int, dp: int, recompute: str
) -> None:
    virtual = SCHEDULES[schedule].virtual[0]
    between = "blocks.1.before" if part == "down" else "blocks.0.down"
    at = (f"blocks.0.{part}", *([between, f"blocks.1.{part}"] if virtual == 2 else []))
    words = f"pp=2 dp={dp} zero={zero} recompute={recompute} schedule={schedule} virtual_stages={virtual}"
    plan = Plan.parse(f"{words} microbatches=4 partition=params")
    for steps in run(plan.mesh().size, trained, on="threads", args=(plan, at, built)):
        agree(steps, expected(), bound=1e-9)
