"""Test that mixtures of transformers train as on one process, with their experts divided over ranks."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")

import meshwise as mw
from expert.mixtures_of_transformers import FAMILIES, batches, build, check, loss, settings
from grid import Grid
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.model.find_mixtures import Mixture, find_mixtures, planned_mixtures
from meshwise.plan import Plan, PlanError
from meshwise.testing import agree, run

PLANS = ("dp=4 ep=2 zero=3 microbatches=2", "dp=4 ep=4 zero=1", "dp=2 tp=2 ep=4 zero=2", "dp=2 tp=2 ep=2 etp=2")


APART = ("Mixtral", "DeepseekV3", "GptOss", "Llama4", "Switch")
"""Families whose experts have a form of their own."""

FAMILY = Grid(
    {"family": tuple(FAMILIES), "plan": PLANS},
    # etp refuses experts that are modules
    exists=lambda cell: (
        cell["family"] != "Ernie" and (cell["family"] not in ("Switch", "Nllb") or "etp" not in cell["plan"])
    ),
    heavy=lambda cell: cell["family"] not in APART,
    strength=1,
)
ON_TWO = Grid(
    {"plan": ("dp=2 ep=2", "tp=2"), "family": tuple(FAMILIES)},
    # attentions that another family has too, and families whose experts `FAMILY` divides
    heavy=lambda cell: (
        cell["family"]
        in {
            "tp=2": ("Mixtral", "Qwen3Moe", "DeepseekV2", "Ernie", "Nllb", "Olmoe"),
            "dp=2 ep=2": APART,
        }[cell["plan"]]
    ),
)


@pytest.mark.grid(ON_TWO)
def test_every_family_is_one_process_on_two_ranks(family: str, plan: str) -> None:
    check(build(family), plan)


@pytest.mark.grid(
    Grid({"family": ("Mixtral", "DeepseekV3", "GptOss")}, heavy=lambda cell: cell["family"] != "DeepseekV3")
)
def test_stages_divide_their_experts(family: str) -> None:
    check(build(family), "pp=2 dp=2 ep=2 microbatches=2")


HOT = Grid(
    {
        "family": ("Qwen3Moe", "DeepseekV3", "GptOss", "Llama4"),
        "plan": (
            "dp=2 tp=2 ep=2 etp=2 zero=3 replicate=2 dispatch_parts=2",
            "dp=2 ep=2 zero=3 replicate=2 dispatch_parts=2",
        ),
    },
    heavy=lambda cell: cell["family"] != ("GptOss" if "etp" in cell["plan"] else "Llama4"),
)


@pytest.mark.grid(HOT)
def test_copies_of_hot_experts_give_the_steps_of_one_process(family: str, plan: str) -> None:
    check(build(family), plan)


@pytest.mark.grid(FAMILY)
def test_two_steps_are_those_of_one_process(family: str, plan: str) -> None:
    check(build(family), plan)


def grouped(family: str, **sizes: int) -> Any:
    """Return a model in float32 whose experts are computed by grouped products, as transformers has it."""
    model = build(family, **sizes).float()
    model.set_experts_implementation("grouped_mm")
    return model


def compared(model: Any, plan: str) -> mw.Report:
    options = Options(forward=lambda model, batch: model(batch[0], use_cache=False).logits)
    return mw.verify(model, loss, batches(), plan, dtype=None, lr=1e-3, options=options)


GROUPED: Sequence[tuple[str, Mapping[str, int], str]] = (
    ("Qwen3Moe", {"moe_intermediate_size": 8}, "dp=2 ep=2 zero=3"),
    ("Qwen3Moe", {"moe_intermediate_size": 8}, "dp=2 tp=2 ep=2 etp=2"),
    ("Qwen3Moe", {"moe_intermediate_size": 8}, "tp=2 etp=2"),
    ("GptOss", {}, "dp=2 tp=2 ep=4 zero=1"),
    ("GptOss", {}, "dp=2 ep=2 zero=1"),
)


@pytest.mark.grid(Grid({"case": GROUPED}, heavy=lambda cell: cell["case"] not in (GROUPED[2], GROUPED[4])))
def test_divided_experts_are_those_of_one_process_by_grouped_products(
    case: tuple[str, Mapping[str, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, sizes, plan = case
    multiply, computed = functional.grouped_mm, []

    def counted(rows: Tensor, matrices: Tensor, **given: Any) -> Tensor:
        computed.append(len(matrices))
        return multiply(rows, matrices, **given)

    monkeypatch.setattr(functional, "grouped_mm", counted)
    report = compared(grouped(family, **sizes), plan)
    assert report.ok, report.verdict
    assert set(computed) == {4, 4 // Plan.parse(plan).ep}, "of one process, and of a rank"


FORMS = Grid({"family": ("Qwen3Moe", "DeepseekV3")}, heavy=lambda cell: cell["family"] == "DeepseekV3")


@pytest.mark.grid(
    Grid(
        {"family": FORMS.axes["family"], "plan": ("tp=2 etp=2", "dp=2 tp=2 ep=2 etp=2")},
        heavy=lambda cell: FORMS.heavy(cell) or "dp=" in cell["plan"],
    )
)
def test_experts_too_narrow_for_grouped_products_are_computed_one_after_the_other(family: str, plan: str) -> None:
    with pytest.warns(UserWarning, match=r"etp=2 leaves \w+ an inner size of 6 in float32.* multiple of 4 \* etp"):
        report = compared(grouped(family), plan)
    assert report.ok, report.verdict


def test_the_inner_size_that_experts_state_is_that_of_this_rank() -> None:
    def main(world: World) -> tuple[int, int]:
        model = build("Mixtral")
        experts: Any = model.get_submodule("model.layers.0.mlp.experts")
        whole = experts.intermediate_dim
        parallelize(model, "tp=2 etp=2", world=world, **settings()).close()
        return whole, experts.intermediate_dim

    assert run(2, main) == [(24, 12)] * 2


def test_the_forms_of_experts_are_found() -> None:
    assert find_mixtures(build("Mixtral")) == {
        f"model.layers.{layer}.mlp.experts": Mixture(4, ("num_experts",)) for layer in (0, 1)
    }
    assert {mixture.form for mixture in find_mixtures(build("Llama4")).values()} == {"rows"}
    assert {mixture.form for mixture in find_mixtures(build("Switch")).values()} == {"called"}
    assert find_mixtures(nn.TransformerEncoderLayer(4, 2)) == {}


def test_a_plan_that_divides_experts_needs_enough_of_them() -> None:
    with pytest.raises(
        PlanError, match=r"no module of Linear was found that holds.* Nearest that works as it is: 'dp=2'"
    ):
        planned_mixtures(nn.Linear(2, 2), plan=Plan.parse("dp=2 ep=2"))
    with pytest.raises(
        PlanError, match=r"model\.encoder\.layers\.1\.ffn\.experts has a module per expert.*'replicate=0'"
    ):
        planned_mixtures(build("Nllb"), plan=Plan.parse("dp=2 ep=2 replicate=1"))
    with pytest.raises(PlanError, match=r"ep=8: model\.layers\.0\.mlp\.experts has only 4 experts.*'ep=4'"):
        planned_mixtures(build("Mixtral"), plan=Plan.parse("dp=8 ep=8"))


@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV3", "GptOss"])
def test_a_folder_of_hugging_face_is_loaded_into_divided_experts(family: str, tmp_path: Path) -> None:
    model = build(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    model.save_pretrained(tmp_path)
    wanted = {name: value.detach().clone() for name, value in model.named_parameters()}

    def load(world: World) -> None:
        trainer = parallelize(build(family), "dp=2 ep=2 zero=3", world=world, **settings())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.load(tmp_path)
        for name, value in trainer.full_parameters():
            assert torch.equal(value.cpu(), wanted[name]), name
        trainer.close()

    run(2, load)


@pytest.mark.grid(FORMS)
def test_a_folder_of_hugging_face_goes_on_in_a_checkpoint_under_another_division(family: str, tmp_path: Path) -> None:
    """Weights of a folder, one step, a checkpoint, and one step of more ranks are two steps of one process."""
    model = build(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    model.save_pretrained(tmp_path / "folder")
    first, second = batches()

    def begin(world: World) -> None:
        trainer = parallelize(build(family), "dp=2 ep=2", world=world, **settings())
        trainer.load(tmp_path / "folder")
        trainer.step(first)
        trainer.save(tmp_path / "checkpoint")
        trainer.close()

    def go_on(world: World) -> Any:
        trainer = parallelize(build(family), "dp=4 ep=4 zero=3", world=world, **settings())
        trainer.load(tmp_path / "checkpoint")
        steps = outcome(trainer, batches=[second])
        trainer.close()
        return steps

    run(2, begin)
    expected = alone(copy.deepcopy(model), batches=[first, second], **settings())[1:]
    for found in run(4, go_on):
        agree(found, expected, bound=1e-9)
