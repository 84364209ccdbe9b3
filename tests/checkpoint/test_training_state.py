"""A checkpoint restores more than tensors; another model or optimizer is refused without a change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.reference import MLP, MLPConfig
from meshwise.testing import agree, run

BATCH = torch.ones(4, 6)


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def model(*, tied: bool = False, width: int = 6, frozen: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 6), nn.Dropout(0.5)).to(dtype)
    if tied:
        made.get_submodule("1").weight = made.get_submodule("0").weight
    if frozen:
        made.get_submodule("0").requires_grad_(False)
    return made


def trainer(world: World, plan: str = "dp=2 zero=1", *, module: nn.Module | None = None, **options: Any) -> Trainer:
    return parallelize(module or model(), plan, loss=loss, world=world, **({"lr": 1e-2} | options))


def saved(root: Path, **kind: Any) -> Path:
    def main(world: World) -> None:
        training = trainer(world, module=model(**kind))
        training.step(BATCH.to(kind.get("dtype", torch.float32)))
        training.save(root / "one", extra={"note": [1, None, "x"]})

    run(2, main)
    return root / "one"


def refused(folder: Path, **how: Any) -> str:
    def main(world: World) -> str:
        training = trainer(world, **how)
        before = [value.clone() for _, value in training.full_parameters()]
        state = {parameter: dict(slots) for parameter, slots in training.optimizer.state.items()}
        with pytest.raises(ValueError, match=str(folder.name) + "|checkpoint") as caught:
            training.load(folder)
        assert {parameter: dict(slots) for parameter, slots in training.optimizer.state.items()} == state
        assert all(torch.equal(*pair) for pair in zip(before, (v for _, v in training.full_parameters()), strict=True))
        return str(caught.value)

    messages: list[str] = run(2, main)
    assert messages[0] == messages[1]
    return messages[0]


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert run(3, lambda world: trainer(world, "dp=3 zero=2").load(folder)) == [{"note": [1, None, "x"]}] * 3


def test_hyperparameters_come_back_under_another_plan(tmp_path: Path) -> None:
    def save(world: World) -> None:
        training = trainer(world, weight_decay=0.3)
        training.step(BATCH)
        for group in training.optimizer.param_groups:
            group["lr"] = 0.125 if group["weight_decay"] else 0.25
        training.save(tmp_path / "one")

    def load(world: World) -> list[tuple[Any, ...]]:
        training = trainer(world, "dp=3 zero=3", weight_decay=0.7)
        training.load(tmp_path / "one")
        return [(group["lr"], group["weight_decay"], group["betas"]) for group in training.optimizer.param_groups]

    run(2, save)
    for groups in run(3, load):
        assert sorted(groups) == [(0.125, 0.3, (0.9, 0.999)), (0.25, 0.0, (0.9, 0.999))]


def test_loading_keeps_the_implementation_of_the_optimizer(tmp_path: Path) -> None:
    folder = saved(tmp_path)

    def load(world: World) -> list[tuple[Any, Any]]:
        training = trainer(world, "dp=1", foreach=False)
        before = [(group["fused"], group["foreach"]) for group in training.optimizer.param_groups]
        training.load(folder)
        training.step(BATCH)
        assert [(group["fused"], group["foreach"]) for group in training.optimizer.param_groups] == before
        return before

    assert all(not fused for fused, _ in run(1, load)[0])


def draws(world: World, folder: Path, plan: str) -> tuple[Tensor, Tensor]:
    training = trainer(world, plan)
    torch.manual_seed(100 + world.rank)
    training.save(folder)
    expected = torch.rand(4)
    torch.manual_seed(0)
    training.load(folder)
    return expected, torch.rand(4)


def test_the_random_generator_of_a_rank_comes_back_to_it(tmp_path: Path) -> None:
    def main(world: World) -> None:
        generator = torch.get_rng_state()
        assert torch.equal(*draws(world, tmp_path / "one", "dp=1"))
        torch.set_rng_state(generator)

    run(1, main)


@pytest.mark.parametrize(
    "kind,how,words",
    [
        ({}, {"module": model(width=8)}, "0.weight has the shape (6, 6) in the checkpoint and (8, 6) in the model"),
        ({}, {"module": nn.Sequential(nn.Linear(6, 6))}, "has parameters that the model has not: 1.bias, 1.weight"),
        ({}, {"module": nn.Sequential(*model().children(), nn.Linear(6, 6))}, "lacks parameters that the model has"),
        ({}, {"optimizer": torch.optim.Adagrad}, "saved with the optimizer AdamW, but this one is Adagrad"),
        ({"dtype": torch.float64}, {}, "cannot hold all its values"),
        ({}, {"options": Options(parameter_options=lambda *_: {})}, "share a group of the optimizer and were saved"),
    ],
    ids=["another shape", "fewer", "more", "another optimizer", "wider", "fewer groups"],
)
def test_another_model_or_optimizer_is_refused_on_every_rank_without_a_change(
    kind: dict[str, Any], how: dict[str, Any], words: str, tmp_path: Path
) -> None:
    assert words in refused(saved(tmp_path, **kind), **how)


@pytest.mark.parametrize("plan", ["dp=2 zero=1", "dp=2 zero=3", "tp=2"])
def test_a_frozen_parameter_may_be_trained_later_as_in_torch(plan: str, tmp_path: Path) -> None:
    """The optimizer state of the others goes on; that of the first layer begins when it is unfrozen."""
    batches = [torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(5)]

    def made(*, frozen: bool) -> nn.Module:
        whole = MLP(MLPConfig(widths=(6, 8, 8, 6))).double()
        torch.manual_seed(0)
        for name, parameter in whole.named_parameters():
            nn.init.normal_(parameter, std=0.3)
            parameter.requires_grad_(not (frozen and name in first))
        return whole

    first = [name for name, _ in MLP(MLPConfig(widths=(6, 8, 8, 6))).named_parameters()][:2]

    def main(world: World) -> Any:
        training = trainer(world, plan, module=made(frozen=True))
        for batch in batches[:2]:
            training.step(batch)
        training.save(tmp_path / "one")
        training = trainer(world, plan, module=made(frozen=False))
        training.load(tmp_path / "one")
        for batch in batches[2:]:
            training.step(batch)
        return {name: value.clone() for name, value in training.full_parameters()}

    single = made(frozen=True)
    named = dict(single.named_parameters())
    groups: list[dict[str, Any]] = [{"params": [p for p in named.values() if p.ndim > 1]}]
    groups += [{"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for number, batch in enumerate(batches):
        if number == 2:
            single.requires_grad_(True)
        optimizer.zero_grad()
        total, count = loss(single(batch), batch)
        (total / count).backward()
        optimizer.step()
    for one in run(2, main):
        agree(one, named, bound=1e-9)


def test_a_trained_parameter_may_be_frozen_later_and_tied_ones_untied(tmp_path: Path) -> None:
    folder = saved(tmp_path, tied=True)

    def load(world: World) -> dict[str, Tensor]:
        training = trainer(world, module=model(tied=True, frozen=True))
        training.load(folder)
        return {name: value.clone() for name, value in training.full_parameters()}

    frozen = run(2, load)[0]

    def apart(world: World) -> dict[str, Tensor]:
        training = trainer(world, "dp=1", module=model())
        training.load(folder)
        return {name: value.clone() for name, value in training.full_parameters()}

    untied = run(1, apart)[0]
    assert torch.equal(untied["0.weight"], untied["1.weight"])
    assert all(torch.equal(frozen[name], untied[name]) for name in frozen)


def test_untied_parameters_cannot_be_tied_later(tmp_path: Path) -> None:
    assert "the model has not: 1.weight" in refused(saved(tmp_path), module=model(tied=True))


def test_float32_loads_into_float64_with_the_optimizers_state(tmp_path: Path) -> None:
    folder = saved(tmp_path)

    def main(world: World) -> None:
        training = trainer(world, "dp=1", module=model(dtype=torch.float64))
        training.load(folder)
        [state, *_] = training.optimizer.state.values()
        assert state["exp_avg"].dtype == torch.float64
        training.step(BATCH.double())

    run(1, main)


def test_a_checkpoint_loads_under_other_options(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    run(2, lambda world: trainer(world, options=Options(clip_norm=1.0)).load(folder))
