"""Test `state_dict` and `save_pretrained` of split models, and that copies of a rank's part are refused."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from grid import Grid, ranks_of
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, alone, run

SPLIT = ["dp=2 zero=3", "tp=2", "pp=2 microbatches=2", "dp=2 tp=2 pp=2 zero=3 microbatches=2", "tp=4 tp_mode=2d"]
over_all_plans = pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=1", *SPLIT])


class Counting(GPT):
    """A GPT with tied weights, a persistent and a passing buffer."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(vocabulary=16, context=4, layers=2, heads=2, width=8, mlp_ratio=2, tied=True))
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


def build() -> nn.Module:
    return Counting().double()


def batch() -> Any:
    tokens = torch.randint(16, (4, 5), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained(world: World, plan: str) -> Trainer:
    trainer = parallelize(build, plan, world=world, loss=next_token_loss, options=Options(example=batch()), lr=1e-2)
    trainer.step(batch())
    return trainer


@over_all_plans
def test_rank_0_gets_the_state_dict_of_one_process(plan: str) -> None:
    first, *others = run(Plan.of(plan).mesh().size, lambda world: trained(world, plan).state_dict())
    assert all(other == {} for other in others)
    assert sorted(first) == sorted(build().state_dict())
    assert first["head.weight"] is first["embedding.weight"]
    [step] = alone(build, loss=next_token_loss, batches=[batch()], lr=1e-2)
    agree({name: first[name] for name in step["parameters"]}, step["parameters"], bound=1e-9)
    fresh = build()
    fresh.load_state_dict(first)
    assert torch.equal(fresh.get_buffer("kept"), torch.arange(3.0, dtype=torch.float64))


COPIES: dict[str, tuple[Any, str]] = {
    "state_dict": (lambda model: model.state_dict(), "trainer.state_dict()"),
    "state_dict of blocks": (lambda model: model.blocks.state_dict(), "trainer.state_dict()"),
    "load_state_dict": (lambda model: model.load_state_dict({}), "trainer.load(folder)"),
    "deepcopy": (copy.deepcopy, "trainer.average(0.999)"),
    "AveragedModel": (AveragedModel, "trainer.average(0.999)"),
    "pickle": (pickle.dumps, "trainer.state_dict()"),
}


@pytest.mark.grid(
    Grid(
        {"plan": SPLIT, "copied": tuple(COPIES)},
        cost=lambda cell: ranks_of(cell["plan"]),
        strength=1,
        heavy=lambda cell: ranks_of(cell["plan"]) > 4,
    )
)
def test_a_copy_of_a_part_is_refused(plan: str, copied: str) -> None:
    act, advice = COPIES[copied]

    def main(world: World) -> None:
        trainer = trained(world, plan)
        for model in trainer.modules:
            with pytest.raises(RuntimeError) as refused:
                act(model)
            assert f"'{trainer.plan}' splits the parameters" in str(refused.value)
            assert advice in str(refused.value)

    run(Plan.of(plan).mesh().size, main)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=2"])
def test_whole_models_are_copied_as_ever(plan: str) -> None:
    def main(world: World) -> None:
        model = trained(world, plan).model
        agree(dict(copy.deepcopy(model).named_parameters()), dict(model.named_parameters()), bound=0.0)
        assert sorted(model.state_dict()) == sorted(build().state_dict())

    run(2, main)


def test_a_model_without_save_pretrained_is_told_what_to_call(tmp_path: Path) -> None:
    def main(world: World) -> None:
        trainer = trained(world, "tp=2")
        with pytest.raises(ValueError, match=r'Counting has no save_pretrained.*torch\.save\(state, "model\.pt"\)'):
            trainer.save_pretrained(tmp_path / "model")

    run(2, main)


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    class Writing(Counting):
        def save_pretrained(self, folder: Path, *, state_dict: dict[str, Any]) -> None:
            assert len(state_dict) > 10
            folder.mkdir()

    def main(world: World) -> None:
        options = Options(example=batch())
        trainer = parallelize(
            lambda: Writing().double(), "tp=2", world=world, loss=next_token_loss, options=options, lr=1
        )
        trainer.save_pretrained(tmp_path / "new")
        with pytest.raises(ValueError, match=r"was not written: .*File exists"):
            trainer.save_pretrained(tmp_path)

    run(2, main)


class SharedActivation(nn.Sequential):
    """Has the activation of a default argument, which all models of the class share, as the MLP of torchtune."""

    def __init__(self, *, activation: nn.Module = nn.Tanh()) -> None:  # noqa: B008 - the form that is tested
        super().__init__(nn.Linear(4, 4), activation, nn.Linear(4, 4))


@pytest.mark.parametrize("plan", ["dp=2 zero=3", "tp=2", "pp=2 microbatches=2"])
def test_models_that_share_a_module_without_parameters_are_copied(plan: str) -> None:
    def main(world: World) -> None:
        options = Options(example=torch.zeros(4, 4))
        split = parallelize(
            SharedActivation, plan, loss=lambda y, x: (y.sum(), len(x)), world=world, lr=0.1, options=options
        )
        copy.deepcopy(SharedActivation())
        split.close()

    run(Plan.parse(plan).mesh().size, main)
