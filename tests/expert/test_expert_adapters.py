"""Test adapters of PEFT on the experts of a mixture, divided with them, against one process."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from expert import mixtures_of_transformers as mixtures
from grid import Grid, ranks_of
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan, PlanError
from meshwise.testing import agree, run
from warm_processes import Processes

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of peft

STACKED = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
ADAPTED = {
    "Mixtral": STACKED,
    "GptOss": STACKED,  # stored as (experts, inputs, outputs), with biases
    "Llama4": STACKED,  # experts that get rows
    "Switch": {"target_modules": ["q", "v", "wi", "wo"]},  # a list of modules
}


def build(family: str) -> Any:
    with mixtures.BUILDING:
        model = peft.get_peft_model(mixtures.build(family), peft.LoraConfig(r=3, **ADAPTED[family])).double()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def made(world: World, *, family: str, plan: str) -> Trainer:
    options = Options(example=mixtures.batches()[0], forward=mixtures.forward)
    return parallelize(build(family), plan, world=world, loss=mixtures.loss, options=options, lr=1e-2)


@functools.cache
def expected(family: str) -> Any:
    options = Options(forward=mixtures.forward)
    return alone(build(family), loss=mixtures.loss, batches=mixtures.batches(), lr=1e-2, options=options)


PLANS = ("ep=2 dp=2", "tp=2", "ep=2 dp=4 zero=2", "pp=2 ep=2 tp=2 microbatches=2")


ADAPTERS = Grid(
    {"family": tuple(ADAPTED), "plan": PLANS},
    cost=lambda cell: ranks_of(cell["plan"]) * (2 if cell["family"] in ("GptOss", "Llama4") else 1),
    strength=1,
)


@pytest.mark.grid(ADAPTERS)
def test_adapters_of_experts_train_as_on_one_process(family: str, plan: str) -> None:
    def main(world: World) -> Any:
        return outcome(made(world, family=family, plan=plan), batches=mixtures.batches())

    for one in run(Plan.parse(plan).mesh().size, main):
        agree(one, expected(family), bound=1e-9)


def trained_twice(world: World, plan: str) -> Any:
    trainer = made(world, family="Mixtral", plan=plan)
    steps = copy.deepcopy(outcome(trainer, batches=mixtures.batches()))  # the last parameters are those of the model
    trainer.world.barrier(axes=["dp"])  # which the ranks share
    with torch.no_grad():
        trainer.model.get_parameter("base_model.model.model.norm.weight").mul_(2)
    message = ""
    try:
        trainer.step(mixtures.batches()[0])
    except ValueError as error:
        message = str(error)
    return steps, message


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["dp=2 zero=1", "dp=2 ep=2 zero=1"])
def test_processes_that_share_experts_let_adapters_wrap_them(plan: str, processes: Processes) -> None:
    """PEFT sets each adapted parameter to itself in a forward. A write to another shared parameter is noticed."""
    for steps, message in run(2, trained_twice, args=(plan,), on=processes):
        agree(steps, expected("Mixtral"), bound=1e-9)
        assert "norm.weight' was written to after the model was parallelized, and the ranks of this host" in message


def test_adapters_of_experts_are_saved_whole(tmp_path: Path) -> None:
    def main(world: World) -> Any:
        trainer = made(world, family="Mixtral", plan="dp=4 ep=4")  # one expert on a rank
        trainer.step(mixtures.batches()[0])
        trainer.save_pretrained(tmp_path)
        return trainer.state_dict()

    state = run(4, main)[0]
    model = peft.PeftModel.from_pretrained(mixtures.build("Mixtral"), tmp_path)
    found = {name: value for name, value in model.state_dict().items() if "lora" in name}
    assert len(found) == 12
    for name, value in found.items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize(
    "family, plan, message",
    [
        ("Mixtral", "tp=2 etp=2", "layers.0.mlp.experts': etp splits no adapters of experts; use etp=1"),
        ("Mixtral", "dp=2 ep=2 replicate=1", "experts': copies of experts have no adapters; use replicate=0"),
        ("GptOss", "dp=4 ep=4", "layers.0.mlp.experts': with is_transposed, PEFT needs two .* use 'ep=2'"),
    ],
)
def test_adapters_of_experts_that_cannot_be_divided_are_refused(family: str, plan: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        run(Plan.parse(plan).mesh().size, lambda world: made(world, family=family, plan=plan))
