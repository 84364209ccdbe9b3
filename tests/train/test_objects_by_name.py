"""From the names in a job to what they name, and the message for a wrong name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwise.reference import GPT, MLP, next_token_loss
from meshwise.train.job_settings import DataJob, Job, JobError, ModelJob, OptimizerJob, TrainJob
from meshwise.train.objects_by_name import locate, loss_function, mean_squared_error, model_function, optimizer

OWN = """
from torch import nn
from neighbour import WIDTH

def build(width=WIDTH, *, bias=True):
    return nn.Linear(width, 1, bias=bias)

def loss(output, batch):
    return output.sum(), output.numel()

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_model.py").write_text(OWN)
    (tmp_path / "neighbour.py").write_text("WIDTH = 5\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "own_model.py"
    for name in ("own_model", "neighbour"):
        sys.modules.pop(name, None)


def build(name: str, dtype: Any = None, **arguments: Any) -> Any:
    job = Job(model=ModelJob(name, arguments), data=DataJob(context=48), train=TrainJob(dtype=dtype))
    return model_function(job)()


def test_the_reference_models_take_their_arguments_from_the_job() -> None:
    gpt = build("gpt", layers=1, width=8, heads=2, tied=True)
    mlp = build("mlp", widths=[3, 4, 5], bias=False)

    assert isinstance(gpt, GPT)
    assert isinstance(mlp, MLP)
    assert (gpt.config.layers, gpt.config.vocabulary, gpt.config.context, gpt.config.tied) == (1, 256, 48, True)
    assert (mlp.config.widths, mlp.config.bias) == ((3, 4, 5), False)


@pytest.mark.parametrize("how", ["a file", "a module"])
def test_a_model_of_your_own_is_found_with_what_lies_beside_it(how: str, own: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(own.parent)

    model = build(f"{own}:build" if how == "a file" else "own_model:build", bias=False)

    assert isinstance(model, nn.Linear)
    assert model.in_features == 5
    assert model.bias is None


def test_a_model_is_built_in_the_type_that_the_job_names() -> None:
    model = build("mlp", dtype="float64", widths=[3, 4])

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("gtp", {}, "model.name = 'gtp' is neither 'gpt', 'mixture', 'mlp' nor a 'module:function'"),
        ("gpt", {"layer": 2}, "model.arguments of gpt: unknown key layer; did you mean layers"),
        ("gpt", {"layers": "two"}, "model.arguments of gpt: layers: not a whole number: 'two'"),
        ("gpt", {"heads": 3}, "must be a multiple of heads=3"),
        ("mlp", {"layers": 2}, "model.arguments of mlp: unknown key layers; the keys are widths, "),
        ("missing.py:build", {}, "there is no file missing.py"),
        ("no_such_module:build", {}, "cannot be imported: No module named 'no_such_module'"),
        ("OWN:biuld", {}, "no function 'biuld' in .*; did you mean 'build'"),
        ("OWN:number", {}, "no function 'number' in .*; there are "),
        ("OWN:build", {"widht": 3}, "model.arguments: unknown argument 'widht'; did you mean 'width'"),
    ],
)
def test_a_wrong_model_is_told_what_is_wrong(name: str, arguments: dict[str, Any], message: str, own: Path) -> None:
    with pytest.raises(JobError, match=message):
        build(name.replace("OWN", str(own)), **arguments)


def test_a_file_with_the_name_of_another_module_is_refused(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def build(): ...")

    with pytest.raises(JobError, match="another module has the name 'json'; rename the file"):
        locate(f"{tmp_path}/json.py:build", key="model.name")


def test_what_the_users_own_module_raises_passes_through(own: Path) -> None:
    own.write_text("1 / 0")

    with pytest.raises(ZeroDivisionError):
        build(f"{own}:build")


def test_a_loss_is_one_of_ours_or_the_users(own: Path) -> None:
    assert loss_function(Job()) is next_token_loss
    assert loss_function(Job(loss="mse")) is mean_squared_error
    padded, logits = loss_function(Job(data=DataJob(dataset="own:chats", collator="pad"))), torch.randn(1, 3, 5)
    tokens = {"tokens": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[1, 2, 3]])}
    summed = torch.nn.functional.cross_entropy(logits[0, :2], torch.tensor([2, 3]), reduction="sum")
    assert list(map(float, padded(logits, tokens))) == pytest.approx([float(summed), 2])
    with pytest.raises(ValueError, match="needs a key 'labels' or 'targets'; the samples have"):
        padded(logits, {"tokens": tokens["tokens"]})
    assert loss_function(Job(loss=f"{own}:loss"))(torch.ones(2, 3), None) == (torch.tensor(6.0), 6)
    with pytest.raises(JobError, match="loss = 'mes' is neither cross-entropy nor mse"):
        loss_function(Job(loss="mes"))


def test_the_mean_squared_error_is_a_sum_and_a_count() -> None:
    total, count = mean_squared_error(torch.tensor([[1.0, 2.0]]), (torch.zeros(1), torch.tensor([[1.0, 5.0]])))

    assert (total.item(), count) == (9.0, 2)
    with pytest.raises(ValueError, match=r"mse: the output is \(2,\) but the target \(2, 1\)"):
        mean_squared_error(torch.zeros(2), (torch.zeros(2), torch.zeros(2, 1)))


def test_an_optimizer_is_any_class_of_torch() -> None:
    job = OptimizerJob("SGD", lr=0.5, weight_decay=0.1, arguments={"momentum": 0.9, "nesterov": True})

    assert optimizer(job) == (torch.optim.SGD, {"lr": 0.5, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True})
    assert optimizer(OptimizerJob(betas=(0.5, 0.6))) == (torch.optim.AdamW, {"lr": 1e-3, "betas": (0.5, 0.6)})


class Own(torch.optim.SGD):
    """An elementwise class of a user."""


def test_an_optimizer_may_be_a_class_of_the_user() -> None:
    kind, arguments = optimizer(OptimizerJob(f"{__file__}:Own", lr=0.5))
    assert (kind.__name__, arguments) == ("Own", {"lr": 0.5})
    with pytest.raises(JobError, match=r"is not an optimizer class"):
        optimizer(OptimizerJob(f"{__file__}:build"))


@pytest.mark.parametrize(
    "job, message",
    [
        (OptimizerJob("Lion"), "'Lion' is no class of torch.optim; there are"),
        (
            OptimizerJob("LAMP"),
            r"'LAMP' is no class of torch.optim; did you mean 'LAMB'\? The classes are .*Muon, .*AdamW, .*LAMB",
        ),
        (OptimizerJob("AdamV"), "optimizer.name = 'AdamV' is no class of torch.optim; did you mean 'Adam"),
        (OptimizerJob("SGD", betas=(0.1, 0.2)), "unknown argument 'betas'; there are dampening, .*, lr"),
        (OptimizerJob("LBFGS"), "LBFGS cannot run on slices of parameters"),
        (OptimizerJob(arguments={"wieght_decay": 1}), "unknown argument 'wieght_decay'; did you mean 'weight_decay'"),
        (OptimizerJob(lr=-1.0), "optimizer.name = 'AdamW' with .*: Invalid learning rate: -1.0"),
    ],
)
def test_a_wrong_optimizer_is_told_what_is_wrong(job: OptimizerJob, message: str) -> None:
    with pytest.raises(JobError, match=message):
        optimizer(job)
