"""Optimizer classes of torch and of libraries give under every plan, by `whole`, what they give on one process."""

import functools
from typing import Any

import pytest
import torch

from grid import Grid
from meshwise import Plan
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.optim import whole
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, alone, outcome, run

SHAPES = ("", "tp=2", "tp=4 tp_mode=2d", "pp=2 microbatches=2", "pp=2 tp=2 microbatches=2", "tp=3")


def kind_and_arguments(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return a class and its arguments. A larger eps keeps gradients that are only rounding from being normalized."""
    if name == "adafactor":
        return torch.optim.Adafactor, {"lr": 0.02, "weight_decay": 0.1, "eps": (1e-8, 1e-3)}
    if name == "adafactor of transformers":
        found = pytest.importorskip("transformers.optimization").Adafactor
        arguments = {"scale_parameter": True, "relative_step": False, "eps": (1e-16, 1e-3), "beta1": 0.9}
        return found, {"lr": 0.02, **arguments}
    if name == "shampoo":
        return pytest.importorskip("pytorch_optimizer").Shampoo, {"lr": 0.02, "momentum": 0.9, "matrix_eps": 1e-4}
    return torch.optim.AdamW, {"lr": 0.01}


NAMES = ("adafactor", "adafactor of transformers", "shampoo", "adamw")


def build(*, tied: bool) -> GPT:
    shape = GPTConfig(vocabulary=16, context=4, layers=2, heads=4, width=12, mlp_ratio=2, tied=tied, bias=True)
    return GPT(shape).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(16, (rows, 5), generator=generator) for rows in (6, 5, 4)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


@functools.cache
def expected(name: str, *, tied: bool) -> Any:
    kind, arguments = kind_and_arguments(name)
    model = functools.partial(build, tied=tied)
    return alone(model, loss=next_token_loss, batches=batches(), optimizer=kind, **arguments)


def trained(world: World, *, plan: str, tied: bool, name: str) -> Any:
    kind, arguments = kind_and_arguments(name)
    options = Options(example=batches()[0])
    model = functools.partial(build, tied=tied)
    trainer = parallelize(
        model, plan, loss=next_token_loss, world=world, options=options, optimizer=whole(kind), **arguments
    )
    return outcome(trainer, batches=batches())


@pytest.mark.grid(
    Grid(
        {"optimizer": NAMES, "shape": SHAPES, "dp": (1, 2, 3), "zero": (0, 1, 2, 3), "tied": (False, True)},
        cost=lambda cell: Plan.parse(f"{cell['shape']} dp={cell['dp']}").mesh().size,
        exists=lambda cell: (
            Plan.parse(f"{cell['shape']} dp={cell['dp']}").mesh().size <= 8
            and not (cell["zero"] and cell["dp"] == 1)
            and not (cell["zero"] > 1 and "pp" in cell["shape"])
        ),
    )
)
def test_a_plan_gives_what_the_class_gives_on_one_process(
    optimizer: str, shape: str, dp: int, zero: int, tied: bool
) -> None:
    plan = f"{shape} dp={dp} zero={zero}"
    for rank in run(Plan.of(plan).mesh().size, functools.partial(trained, plan=plan, tied=tied, name=optimizer)):
        agree(rank, expected(optimizer, tied=tied), bound=1e-9)


def test_state_of_any_shape_is_loaded_under_another_plan(tmp_path: Any) -> None:
    """Rows and columns of Adafactor, and the preconditioners and the count in the group of Shampoo, on their owners."""
    for name in ("adafactor", "shampoo"):
        kind, arguments = kind_and_arguments(name)

        def train(world: World, *, plan: str, begin: int, end: int, name: str = name) -> Any:
            kind, arguments = kind_and_arguments(name)
            trainer = parallelize(
                functools.partial(build, tied=True),
                plan,
                loss=next_token_loss,
                world=world,
                options=Options(example=batches()[0]),
                optimizer=whole(kind),
                **arguments,
            )
            if begin:
                trainer.load(tmp_path / name)
            steps = outcome(trainer, batches=batches()[begin:end])
            if not begin:
                trainer.save(tmp_path / name)
            return steps

        run(3, functools.partial(train, plan="dp=3 zero=3", begin=0, end=2))
        for plan in ("dp=2 tp=2 zero=1", "pp=2 microbatches=2"):
            later = run(Plan.of(plan).mesh().size, functools.partial(train, plan=plan, begin=2, end=3))
            agree(later[0], expected(name, tied=True)[2:], bound=1e-9)
