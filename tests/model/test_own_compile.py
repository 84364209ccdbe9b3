"""Models of which the user has compiled parts: the same losses, or a refusal that names compile=blocks."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan, PlanError
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, run
from model.test_compiled_blocks import tokens

pytestmark = [
    # Where it traces our own modes and functions.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a"),
    pytest.mark.filterwarnings("ignore:.*Function.> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
    pytest.mark.skipif(
        torch.__version__ < "2.13", reason="torch 2.11 crashes when two threads compile; ranks are threads"
    ),
]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def model(compiled: str, backend: str, dropout: float = 0.0, layers: int = 1) -> nn.Module:
    """A GPT with a compiled `block` or `mlp` in each layer, or a `call` of a block that compiles itself."""
    built = GPT(GPTConfig(vocabulary=32, context=8, layers=layers, heads=2, width=16, dropout=dropout)).double()
    for number, block in enumerate(built.blocks):
        if compiled == "block":
            built.blocks[number] = torch.compile(block, backend=backend)  # type: ignore[assignment]
        elif compiled == "mlp":
            vars(block)["_modules"]["mlp"] = torch.compile(block.get_submodule("mlp"), backend=backend)
        elif compiled == "call":
            block.compile(backend=backend)
    return built


def losses(world: World, plan: str, compiled: str, backend: str = "eager", dropout: float = 0.0) -> list[Any]:
    """Losses and norms of three steps, of a model that is built on every rank alike."""
    options, layers = Options(example=tokens(0)), Plan.parse(plan).pp
    build = functools.partial(model, compiled, backend, dropout, layers)
    trainer = parallelize(build, plan, world=world, loss=next_token_loss, options=options, lr=1e-2)
    results = [trainer.step(tokens(number)) for number in range(3)]
    return [(result.loss, result.grad_norm) for result in results]


COMPILED = (
    ("dp=1", "call", 0.0),
    ("dp=2 zero=1", "block", 0.0),
    ("dp=2 zero=3", "mlp", 0.0),
    ("pp=2 microbatches=2", "block", 0.0),
    ("dp=1 recompute=full", "mlp", 0.0),
    ("dp=1 random=global", "mlp", 0.1),
    ("dp=1 random=local", "mlp", 0.1),
)


@pytest.mark.grid(Grid({"case": COMPILED}, heavy=lambda cell: cell["case"] == COMPILED[1]))
def test_compiled_parts_change_no_loss(case: tuple[str, str, float]) -> None:
    plan, compiled, dropout = case
    ranks = Plan.parse(plan).mesh().size
    expected = run(ranks, losses, args=(plan, "", "eager", dropout))
    agree(run(ranks, losses, args=(plan, compiled, "eager", dropout)), expected, bound=1e-9)


@pytest.mark.filterwarnings(r"ignore:`torch\.jit:DeprecationWarning")  # of inductor itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_part_compiled_by_inductor_changes_no_loss() -> None:
    expected = run(1, losses, args=("dp=1", ""))
    agree(run(1, losses, args=("dp=1", "mlp", "inductor")), expected, bound=1e-9)


@pytest.mark.parametrize(
    "plan, compiled, why",
    [
        ("dp=2 zero=3", "block", "zero=3 gathers its parameters; leave torch.compile out, and let.*compile=blocks"),
        ("dp=2 zero=3", "call", "zero=3 gathers its parameters; leave torch.compile out, and let.*compile=blocks"),
        ("cp=2", "call", "cp changes its attention.*cp=1 with compile=blocks"),
        ("tp=2", "mlp", "tp changes what its modules compute; leave.*compile=blocks"),
    ],
)
def test_a_plan_that_changes_a_compiled_module_is_refused(plan: str, compiled: str, why: str) -> None:
    name = r"blocks\.0\.mlp" if compiled == "mlp" else r"blocks\.0"
    with pytest.raises(PlanError, match=rf"{name} is compiled, and {why}"):
        run(2, losses, args=(plan, compiled))
