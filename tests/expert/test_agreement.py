"""Test that a mixture of experts under every plan gives the numbers of one process to 1e-9.

Two steps of AdamW with clipping in float64, with batches of 7 and 2 rows: loss, gradient norm, every gradient
(router, experts, dense) and every parameter are compared after every step, on every rank."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid, ranks_of
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.reference import MixtureConfig, MixtureGPT, next_token_loss
from meshwise.testing import agree, run

VOCABULARY, CONTEXT, ROWS = 16, 4, (7, 2)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "top-1": {"choices": 1},
    "top-2": {},
    "capacity": {"capacity": 1.0},
    "noisy": {"routing": "noisy", "dropout": 0.2},
    "expert-choice": {"routing": "expert-choice"},
    "biased": {"routing": "biased"},
    "5 experts": {"experts": 5},
}


def build(kind: str, *, tied: bool) -> nn.Module:
    sizes = {"vocabulary": VOCABULARY, "context": CONTEXT, "layers": 2, "heads": 2, "width": 8, "mlp_ratio": 2}
    return MixtureGPT(MixtureConfig(**{**sizes, "experts": 4, "tied": tied, **KINDS[kind]})).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator) for rows in ROWS]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def training(kind: str = "top-2", *, cp: int = 1) -> dict[str, Any]:
    whole = cp > 1 and kind == "expert-choice"  # such a router compares the tokens of a sequence
    rules = {"blocks.*.mlp": "tokens whole"} if whole else None
    rate = 0.02 if KINDS[kind].get("routing") == "biased" else 0.0
    options = Options(clip_norm=0.5, example=batches()[0], tensor_rules=rules, expert_bias_rate=rate)
    return {"loss": next_token_loss, "options": options, "lr": 1e-2, "weight_decay": 0.1}


@functools.cache
def expected(kind: str, tied: bool) -> Any:
    return alone(functools.partial(build, kind, tied=tied), batches=batches(), **training(kind))


def check(plan: str, kind: str, *, tied: bool = False) -> None:
    def main(world: World) -> Any:
        given = training(kind, cp=Plan.parse(plan).cp)
        trainer = parallelize(functools.partial(build, kind, tied=tied), plan, world=world, **given)
        steps = outcome(trainer, batches=batches())
        trainer.close()
        return steps

    for steps in run(Plan.parse(plan).mesh().size, main):
        agree(steps, expected(kind, tied), bound=1e-9)


RANKS = (
    "dp=2",
    "dp=2 ep=2",
    "dp=4 ep=2",
    "dp=4 ep=4",
    "pp=2 dp=2 ep=2",
    "tp=2",
    "tp=2 etp=2",
    "dp=2 tp=2 etp=2",
    "dp=2 tp=2 ep=4",
    "dp=2 tp=2 ep=2 etp=2",
    "pp=2 tp=2 ep=2",
    "dp=2 tp=2 ep=4 sequence_parallel=1",
    "tp=2 etp=2 sequence_parallel=1",
    "cp=2 ep=2 context=ulysses",
    "dp=2 cp=2 ep=4 chunk=3",
    "dp=2 cp=2 ep=4",
    "cp=2 tp=2 ep=2 etp=2 context=ring",
    "pp=2 cp=2 ep=2 context=striped",
    "pp=2 tp=2 etp=2",
    "pp=2 dp=4 ep=4",
)


SAME = (
    "dp=2 tp=2 etp=2",
    "dp=2 tp=2 ep=4",
    "pp=2 tp=2 ep=2",
    "pp=2 tp=2 etp=2",
    "pp=2 cp=2 ep=2 context=striped",
    "dp=2 cp=2 ep=4 chunk=3",
)

LAYOUTS = Grid(
    {
        "ranks": RANKS,
        "zero": (0, 1, 2, 3),
        "rest": ("", "microbatches=3", "recompute=full", "recompute=selective microbatches=2"),
        "tied": (False, True),
    },
    cost=lambda cell: ranks_of(cell["ranks"]) * (1 + len(cell["rest"].split())),
    single=("zero", "rest", "tied"),
    # other cells divide the same: in stages, at chunks, with sequence parallelism, or with fewer replicas
    heavy=lambda cell: ranks_of(cell["ranks"]) == 8 or cell["ranks"] in SAME,
)


@pytest.mark.grid(LAYOUTS)
def test_a_plan_is_one_process(ranks: str, zero: int, rest: str, tied: bool) -> None:
    check(f"{ranks} zero={zero} {rest}", "top-2", tied=tied)


@pytest.mark.parametrize(
    "plan",
    ["dp=2 ep=2 zero=3 offload=params:disk,optimizer:disk", "dp=4 ep=2 zero=1 offload=optimizer:cpu,gradients:disk"],
)
def test_divided_experts_in_other_tiers_are_those_of_one_process(plan: str) -> None:
    check(plan, "top-2")


@pytest.mark.grid(
    Grid(
        {"plan": ("dp=4 ep=4 zero=3", "pp=2 tp=2 ep=2", "dp=2 tp=2 ep=2 etp=2 zero=1")},
        heavy=lambda cell: "pp=" in cell["plan"],
    )
)
def test_options_of_experts_are_those_of_one_process(plan: str) -> None:
    """Each block's experts, and both matrices of them, have a rate and a decay of their own."""

    def options_of(name: str, parameter: nn.Parameter) -> dict[str, float]:
        if ".experts." not in name:
            return {}
        return {
            "lr": 0.02 if name.startswith("blocks.0") else 0.003,
            "weight_decay": 0.5 if "expansion" in name else 0.0,
        }

    given = training("top-2")
    given["options"] = dataclasses.replace(given["options"], parameter_options=options_of)

    def main(world: World) -> Any:
        trainer = parallelize(lambda: build("top-2", tied=False), plan, world=world, **given)
        steps = outcome(trainer, batches=batches())
        trainer.close()
        return steps

    wanted = alone(lambda: build("top-2", tied=False), batches=batches(), **given)
    for steps in run(Plan.parse(plan).mesh().size, main):
        agree(steps, wanted, bound=1e-9)
    with pytest.raises(AssertionError):
        agree(wanted, expected("top-2", False), bound=1e-9)


KIND = Grid(
    {
        "kind": tuple(KINDS),
        "ranks": (
            "dp=2 ep=2",
            "dp=4 ep=2 zero=3",
            "dp=2 tp=2 ep=4 microbatches=2",
            "pp=2 dp=2 ep=2 recompute=full",
        ),
        "tied": (False, True),
    },
    cost=lambda cell: ranks_of(cell["ranks"]) * len(cell["ranks"].split()),
    # `DISPATCH` has other routings than top-2 under tp and in stages
    heavy=lambda cell: "tp=" in cell["ranks"] or "pp=" in cell["ranks"],
    strength=1,
)


@pytest.mark.grid(KIND)
def test_every_kind_of_routing_is_that_of_one_process(kind: str, ranks: str, tied: bool) -> None:
    check(ranks, kind, tied=tied)


DISPATCH = Grid(
    {
        "ranks": (
            "dp=4 ep=2",
            "dp=2 tp=2 ep=4",
            "dp=2 tp=2 ep=2 etp=2 sequence_parallel=1",
            "pp=2 dp=2 ep=2",
            "pp=2 dp=2 ep=2 schedule=zb-h1",
            "cp=2 ep=2",
        ),
        "zero": (0, 3),
        "dispatch": ("auto", "all-gather"),
        "chunk": (0, 3),
        "kind": ("top-2", "noisy", "expert-choice", "5 experts"),
        "rest": (
            "",
            "microbatches=3",
            "recompute=full",
            "recompute=selective",
            "budget=20K",
            "offload=activations:cpu",
        ),
    },
    exists=lambda cell: cell["dispatch"] != "auto" or cell["chunk"] > 0,
    cost=lambda cell: ranks_of(cell["ranks"]),
    # stages in an order of their own, and tokens that tp divides, show more
    heavy=lambda cell: cell["ranks"] in ("pp=2 dp=2 ep=2", "dp=4 ep=2", "dp=2 tp=2 ep=4"),
    strength=1,
)


@pytest.mark.grid(DISPATCH)
def test_every_dispatch_is_one_process(ranks: str, zero: int, dispatch: str, chunk: int, kind: str, rest: str) -> None:
    check(f"{ranks} zero={zero} dispatch={dispatch} chunk={chunk} {rest}", kind)
