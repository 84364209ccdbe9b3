"""Test parameters whose `requires_grad` changes between steps: training goes on as in plain torch, under every plan."""

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from grid import Cell, Grid, ranks_of
from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.model.whole_parameters import LogicalTensors
from meshwise.optim import LAMB, LARS, Muon, OneBitAdam, Several, parameter_rule, whole
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, MixtureConfig, MixtureGPT, next_token_loss
from meshwise.testing import agree, run

CLIP, STEPS = 0.5, 6
SEVERAL = {"hidden": (Muon, {"lr": 0.02, "weight_decay": 0.1}), "rest": (torch.optim.Adam, {"lr": 1e-2})}
OPTIMIZERS: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adafactor": (whole(torch.optim.Adafactor), {"lr": 1e-2, "weight_decay": 0.1}),
    "several": (Several, {"optimizers": SEVERAL}),
    "lamb": (LAMB, {"lr": 1e-2, "weight_decay": 0.1}),
    "lars": (LARS, {"lr": 1.0, "weight_decay": 0.1}),
}
AXES = {
    "split": (
        "dp=2",
        "dp=2 microbatches=2 recompute=full",
        "tp=2",
        "dp=2 tp=2",
        "cp=2",
        "pp=2 microbatches=2",
        "pp=2 microbatches=2 schedule=zb-h1",
        "pp=2 dp=2 microbatches=4 schedule=interleaved virtual_stages=2",
    ),
    "zero": (0, 1, 2, 3),
    "offload": ("none", "optimizer:cpu masters:cpu gradients:cpu", "optimizer:disk masters:disk gradients:disk"),
    "optimizer": tuple(OPTIMIZERS),
}


def exists(cell: Cell) -> bool:
    offloads = cell["offload"] != "none"
    return not (offloads and (cell["optimizer"] not in ("adamw", "sgd") or cell["zero"] == 0)) and not (
        "pp" in cell["split"] and cell["zero"] == 2
    )


GRID = Grid(
    AXES,
    exists=exists,
    cost=lambda cell: ranks_of(cell["split"]),
    single=("optimizer", "split"),
)


@functools.cache
def made() -> nn.Module:
    torch.manual_seed(0)
    shape = GPTConfig(vocabulary=16, context=8, layers=4, heads=2, width=8, mlp_ratio=2, tied=False)
    return GPT(shape).double()


def copied(model: Callable[[], nn.Module]) -> nn.Module:
    copy = type(model())(model().config).double()
    copy.load_state_dict(model().state_dict())
    return copy


def tokens(number: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(16, (8, 9), generator=torch.Generator().manual_seed(number))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def set_trained(model: nn.Module, number: int) -> None:
    """The head alone for two steps, then everything, then without some, which differ in the middle of a block."""
    for name, parameter in model.named_parameters():
        if number < 2:
            parameter.requires_grad_("head." in name)
        elif number == 4:
            parameter.requires_grad_(not any(part in name for part in ("attention", "head.", "up.bias")))
        else:
            parameter.requires_grad_(True)


def built(kind: Any, arguments: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer on one process, with the groups of `parallelize`."""
    named = dict(model.named_parameters())
    rule = parameter_rule(model, several=kind is Several)
    groups: dict[Any, list[str]] = {}
    for name, parameter in named.items():
        groups.setdefault(tuple(sorted(rule(name, parameter).items())), []).append(name)
    lists = [{"params": [named[name] for name in names], **dict(key)} for key, names in groups.items()]
    if getattr(kind, "needs", None):
        arguments = {**arguments, "logical": LogicalTensors(named)}
    optimizer: torch.optim.Optimizer = kind(lists, **arguments)
    return optimizer


def plain_steps(model: nn.Module, optimizer: str) -> Iterator[Tensor]:
    """Train with plain torch, and yield the norm of each step after its update."""
    update = built(*OPTIMIZERS[optimizer], model)
    for number in range(STEPS):
        set_trained(model, number)
        update.zero_grad(set_to_none=True)
        total, count = next_token_loss(model(tokens(number)[0]), tokens(number))
        (total / count).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        update.step()
        yield norm


def numbers(model: Callable[[], nn.Module], optimizer: str) -> dict[str, Any]:
    """Return norms and parameters of plain torch."""
    single = copied(model)
    norms = list(plain_steps(single, optimizer))
    return {"norms": torch.stack(norms), **{name: value.detach() for name, value in single.named_parameters()}}


@functools.cache
def plain(optimizer: str) -> dict[str, Any]:
    return numbers(made, optimizer)


def trainer(world: World, plan: str, optimizer: str = "adamw", **settings: Any) -> Trainer:
    model = settings.pop("model", made)
    kind, arguments = OPTIMIZERS[optimizer]
    options = Options(clip_norm=CLIP, example=tokens(0), **settings)
    given = {"optimizer": kind, "options": options, **arguments}
    return parallelize(copied(model), plan, world=world, loss=next_token_loss, **given)


def parameters(training: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in training.full_parameters()}


def steps(training: Trainer, first: int = 0, last: int = STEPS) -> list[float]:
    norms = []
    for number in range(first, last):
        set_trained(training.model, number)
        norms.append(training.step(tokens(number)).grad_norm)
    return norms


def ranks(plan: str) -> int:
    return Plan.parse(plan).mesh().size


@pytest.mark.grid(GRID)
def test_parameters_that_are_turned_off_and_on_train_as_in_torch(
    split: str, zero: int, offload: str, optimizer: str
) -> None:
    plan = f"{split} zero={zero} offload={offload.replace(' ', ',')}"

    def main(world: World) -> Any:
        training = trainer(world, plan, optimizer)
        return {"norms": torch.tensor(steps(training), dtype=torch.float64), **parameters(training)}

    for one in run(ranks(plan), main):
        agree(one, plain(optimizer), bound=1e-9)


def mixture() -> nn.Module:
    torch.manual_seed(0)
    shape = MixtureConfig(vocabulary=16, context=8, layers=2, heads=2, width=8, mlp_ratio=2, experts=4)
    return MixtureGPT(shape).double()


@pytest.mark.parametrize("plan", ["dp=2 ep=2 zero=1", "tp=2 ep=2", "dp=2 ep=2 zero=3 microbatches=2", "pp=2 dp=2 ep=2"])
def test_experts_are_turned_off_and_on(plan: str) -> None:
    built_once = mixture()

    def main(world: World) -> Any:
        training = trainer(world, plan, model=lambda: built_once)
        return {"norms": torch.tensor(steps(training), dtype=torch.float64), **parameters(training)}

    expected = numbers(lambda: built_once, "adamw")
    for one in run(ranks(plan), main):
        agree(one, expected, bound=1e-9)


@pytest.mark.parametrize("plan", ["dp=2 zero=0", "dp=2 zero=3", "tp=2 zero=1", "cp=2"])
def test_open_steps_accumulate_and_yield_gradients_of_what_trains(plan: str) -> None:
    def main(world: World) -> Any:
        training = trainer(world, plan)
        for number in range(STEPS):
            set_trained(training.model, number)
            on = {name for name, parameter in training.model.named_parameters() if parameter.requires_grad}
            inputs, targets = tokens(number)
            with training.open_step() as step:
                for half in ((inputs[:4], targets[:4]), (inputs[4:], targets[4:])):
                    step.backward(step.loss(half) / 2)
                assert {name for name, _ in step.gradients()} == on
                step.update()
        return parameters(training)

    expected = {name: value for name, value in plain("adamw").items() if name != "norms"}
    for one in run(ranks(plan), main):
        agree(one, expected, bound=1e-9)


RESUMED = Grid(
    {
        "plans": (
            ("dp=2 zero=1", "pp=2 microbatches=2"),
            ("tp=2", "dp=2 zero=3"),
            ("pp=2 microbatches=2", "tp=2 zero=1"),
        ),
        "number": (1, 3, 5),  # saved with the head alone, with all, without some
        "optimizer": ("adamw", "sgd", "several", "adafactor"),
    },
    strength=1,
)


@pytest.mark.grid(RESUMED)
def test_a_run_resumes_under_another_plan_with_the_state_of_each_parameter(
    plans: tuple[str, str], number: int, optimizer: str, tmp_path: Path
) -> None:
    plan, other = plans

    def first(world: World) -> None:
        training = trainer(world, plan, optimizer)
        steps(training, 0, number)
        training.save(tmp_path)

    def second(world: World) -> Any:
        training = trainer(world, other, optimizer)
        training.load(tmp_path)
        steps(training, number)
        return parameters(training)

    run(2, first)
    expected = {name: value for name, value in plain(optimizer).items() if name != "norms"}
    for one in run(2, second):
        agree(one, expected, bound=1e-9)


@functools.cache
def plain_average() -> dict[str, Tensor]:
    model = copied(made)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    average.n_averaged.fill_(1)  # begin with the initial parameters
    for _ in plain_steps(model, "adamw"):
        average.update_parameters(model)
    return {name: value.detach() for name, value in average.module.named_parameters()}


@pytest.mark.parametrize("plan", ["dp=2 zero=1", "dp=2 zero=3", "pp=2 microbatches=2"])
def test_the_average_of_a_frozen_parameter_is_that_of_one_process(plan: str) -> None:
    def main(world: World) -> Any:
        training = trainer(world, plan)
        average = training.average(0.7)
        steps(training)
        with average.applied():
            return parameters(training)

    for one in run(2, main):
        agree(one, plain_average(), bound=1e-9)


@pytest.mark.filterwarnings(
    "ignore:.*grad attribute of a Tensor that is not a leaf", "ignore:.*has compiled the forward"
)
@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_on_parameters_and_compiled_blocks_go_on(compiled: bool) -> None:
    """A hook that doubles gradients acts while its parameter trains."""
    plan = f"dp=2 zero=1 compile={'blocks' if compiled else 'off'}"
    single = copied(made)
    single.get_parameter("head.weight").register_hook(lambda gradient: 2 * gradient)
    list(plain_steps(single, "adamw"))

    def main(world: World) -> Any:
        training = trainer(world, plan, compiler="eager")
        training.model.get_parameter("head.weight").register_hook(lambda gradient: 2 * gradient)
        steps(training)
        return parameters(training)

    for one in run(2, main):
        agree(one, dict(single.named_parameters()), bound=1e-9)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan,opened",
    [("dp=2", False), ("dp=2 zero=2", True), ("tp=2", True), ("tp=2", False), ("pp=2 dp=2 microbatches=2", False)],
)
def test_ranks_that_freeze_different_parameters_get_one_error_and_can_mend_it(plan: str, opened: bool) -> None:
    def take(training: Trainer) -> None:
        if not opened:
            training.step(tokens(0))
            return
        with training.open_step() as step:
            step.backward(step.loss(tokens(0)))
            step.update()

    def main(world: World) -> Any:
        training = trainer(world, plan)
        before = parameters(training)
        for name, parameter in training.model.named_parameters():
            parameter.requires_grad_(world.rank != 0 or "qkv" not in name)
        for _ in range(2):
            with pytest.raises(
                RanksDisagree, match=r"requires_grad of '.*qkv.*' is False on rank 0 .*one value on every rank"
            ):
                take(training)
        agree(parameters(training), before, bound=0.0)
        training.model.requires_grad_(True)
        take(training)

    run(ranks(plan), main)


def test_a_parameter_that_was_frozen_before_cannot_train_later() -> None:
    def main(world: World) -> None:
        model = copied(made)
        model.get_parameter("head.weight").requires_grad_(False)
        training = parallelize(model, "dp=2", world=world, loss=next_token_loss, lr=1e-2)
        training.model.requires_grad_(True)
        with pytest.raises(
            ValueError, match=r"'head.weight' was frozen when the model was parallelized.*named_parameters"
        ):
            training.step(tokens(0))

    run(2, main)


def test_under_pp_the_given_model_is_not_the_one_to_change() -> None:
    def main(world: World) -> None:
        model = copied(made)
        options = Options(example=tokens(0))
        plan = "pp=2 microbatches=2"
        training = parallelize(model, plan, world=world, loss=next_token_loss, options=options, lr=1e-2)
        model.requires_grad_(False)
        with pytest.raises(ValueError, match=r"in the model that parallelize was given.* change it in trainer.model"):
            training.step(tokens(0))

    run(2, main)


def test_copies_of_a_tied_weight_in_two_stages_of_a_rank_are_frozen_together() -> None:
    def main(world: World) -> None:
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocabulary=16, context=8, layers=4, heads=2, width=8, mlp_ratio=2, tied=True))
        options, plan = Options(example=tokens(0)), "pp=2 microbatches=4 schedule=zb-v virtual_stages=2"
        training = parallelize(model, plan, world=world, loss=next_token_loss, options=options, lr=1e-2)
        engine = training._engine
        for module in training.modules if world.rank == 0 else ():
            module.get_parameter("embedding.weight").requires_grad_(False)
            engine.check_parameters()
            if module is training.modules[0]:
                with pytest.raises(ValueError, match=r"'embedding.weight' differs between two stages of this rank"):
                    engine.follow_requires_grad()
        engine.follow_requires_grad()
        assert engine.frozen().get("embedding.weight", world.rank == 0) == (world.rank == 0)

    run(2, main)


@pytest.mark.parametrize("plan", ["dp=2 zero=0", "dp=2 zero=2"])
def test_a_parameter_that_is_frozen_inside_of_an_open_step_stays_from_the_next_step_on(plan: str) -> None:
    def main(world: World) -> None:
        training = trainer(world, plan)
        frozen = training.model.get_submodule("blocks.1.mlp_norm")
        for number in range(4):
            before = parameters(training)
            with training.open_step() as step:
                loss = step.loss(tokens(number))
                if number == 2:
                    frozen.requires_grad_(False)
                step.backward(loss)
                step.update()
        after = parameters(training)
        changed = {name for name in after if not torch.equal(before[name], after[name])}
        assert changed == {name for name in after if "blocks.1.mlp_norm" not in name}

    run(2, main)


@pytest.mark.parametrize("frozen", ["", "norm", "blocks.3"])
def test_reductions_begin_in_the_backward_beside_a_frozen_unit(frozen: str) -> None:
    def main(world: World) -> int:
        training = trainer(world, "dp=2 zero=2")
        for name in filter(None, (frozen, frozen and "head")):
            training.model.get_submodule(name).requires_grad_(False)
        training.step(tokens(0))
        begun = []
        with world.record() as calls:
            first = training.model.get_submodule("blocks.0")
            first.register_full_backward_pre_hook(lambda *_: begun.append(len(calls)))
            training.step(tokens(1))
        return begun[0]

    assert min(run(2, main)) > 0


@pytest.mark.parametrize(
    "plan,kind,what",
    [("dp=2 sync=local every=2", torch.optim.AdamW, "sync=local"), ("dp=2", OneBitAdam, "OneBitAdam")],
)
def test_what_moves_parameters_without_gradients_refuses_frozen_ones(plan: str, kind: Any, what: str) -> None:
    def main(world: World) -> None:
        training = parallelize(copied(made), plan, world=world, loss=next_token_loss, optimizer=kind, lr=1e-2)
        training.model.get_parameter("head.weight").requires_grad_(False)
        with pytest.raises(ValueError, match=f"'head.weight' was turned off, and {what} moves"):
            training.step(tokens(0))

    run(2, main)
