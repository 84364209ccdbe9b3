"""The interpreter on ranks gives the gradients of one process, for every schedule and every size of micro-batches."""

import contextlib
import copy
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid
from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import World
from meshwise.pipeline.cut.model_cut import CutRequest, cut_model
from meshwise.pipeline.run import schedule_interpreter
from meshwise.pipeline.run.schedule_interpreter import MicrobatchJob, ScheduleInterpreter
from meshwise.pipeline.run.stage_backward import split_pays
from meshwise.pipeline.run.stage_forward import StageError, make_stage
from meshwise.pipeline.schedules.named_schedules import SCHEDULES, make_schedule, planned_schedule
from meshwise.pipeline.schedules.schedule_table import lower
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, run

MICROBATCHES = 8
LENGTHS = (12, 5, 12, 9, 12, 12, 5, 3)


class Plain:
    """Keeps nothing in pieces."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def running(self, index: int, *, batch: Any, again: bool) -> Any:
        assert batch is None
        self.did.append(f"{'B' if again else 'F'}{index}")
        return contextlib.nullcontext()

    def gather(self) -> None:
        self.did.append("gather")

    def ready(self) -> None:
        assert "gather" in self.did
        assert "free" not in self.did

    def free(self) -> None:
        self.did.append("free")

    def reduce(self) -> None:
        self.did.append("reduce")


def gpt(*, tied: bool = False) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=31, context=12, layers=6, heads=2, width=8, tied=tied)).double()


def micro_batch(index: int) -> Tensor:
    length = LENGTHS[index % len(LENGTHS)]
    return torch.arange(2 * length).reshape(2, length) * (7 + index) % 31


def lm(model: nn.Module, index: int) -> Tensor:
    tokens = micro_batch(index).to(next(model.parameters()).device)
    return next_token_loss(model(tokens), (tokens, tokens.roll(-1, dims=1)))[0]


def jobs(present: range) -> Mapping[int, MicrobatchJob]:
    return {i: MicrobatchJob(functools.partial(lm, index=i), micro_batch(i).shape) for i in present}


def first(model: nn.Module) -> Tensor:
    return lm(model, 0)


def losses_and_gradients(
    world: World, name: str, *, model: nn.Module, present: range, table: Any = make_schedule
) -> tuple[dict[int, Any], list[Any]]:
    """Of one rank: the losses it has, and of each of its stages the gradients."""
    world = world.over(Mesh((("pp", world.size),)))
    schedule = lower(table(name, pp=world.size, microbatches=MICROBATCHES), gathers=True)
    cut = cut_model(model, stages=schedule.stages, call=first, request=CutRequest("params"))
    mine = schedule.stages_of(world.rank)
    models = {index: copy.deepcopy(model).to(world.device) for index in mine}
    stages = {index: make_stage(models[index], cut=cut, index=index) for index in mine}
    storages = {index: Plain() for index in mine}
    runtime = ScheduleInterpreter(stages, storages=storages, world=world)
    returned = {}
    for _ in range(2):  # the second time every shape is agreed
        returned = runtime.run(schedule, jobs=jobs(present))
        for storage in storages.values():
            assert (storage.did[0], *storage.did[-2:]) == ("gather", "reduce", "free")
            storage.did.clear()
    gradients = [
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None} for model in models.values()
    ]
    return {index: loss.detach() for index, loss in returned.items()}, gradients


@pytest.mark.grid(
    Grid({"name": tuple(SCHEDULES), "pp": (2, 4), "tied": (False, True)}, cost=lambda cell: cell["pp"] ** 2, strength=1)
)
def test_a_schedule_on_ranks_gives_the_gradients_of_one_process(name: str, pp: int, tied: bool) -> None:
    present = range(MICROBATCHES) if tied else range(5)  # of the others, nobody has rows
    model = gpt(tied=tied)
    whole = copy.deepcopy(model)
    expected = {index: lm(model, index) for index in present}
    (2 * torch.stack(list(expected.values())).sum()).backward()
    ranks = run(pp, lambda world: losses_and_gradients(world, name, model=whole, present=present))
    losses = {index: loss for found, _ in ranks for index, loss in found.items()}
    summed: dict[str, Tensor] = {}
    for gradients in (stage for _, stages in ranks for stage in stages):
        for key, gradient in gradients.items():
            summed[key] = summed.get(key, 0) + gradient
    agree(losses, {index: loss.detach() for index, loss in expected.items()}, bound=1e-12)
    agree(summed, {key: p.grad for key, p in model.named_parameters()}, bound=1e-11)


@pytest.mark.parametrize("name, pays", [("1f1b", False), ("1f1b", True), ("zb-h1", False)])
def test_i_runs_the_whole_backward_if_w_is_next_and_small(
    name: str, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    backward = torch.autograd.backward

    def counted(*args: Any, **options: Any) -> None:
        calls.append(1)
        backward(*args, **options)

    monkeypatch.setattr(torch.autograd, "backward", counted)
    if pays:
        monkeypatch.setattr(schedule_interpreter, "split_pays", lambda *_, **__: True)
    call = functools.partial(losses_and_gradients, name=name, model=gpt(), present=range(8), table=planned_schedule)
    run(2, call)
    assert (len(calls) == 2 * 2 * MICROBATCHES) == (name == "1f1b" and not pays)


def test_w_pays_from_a_number_of_products_on() -> None:
    stage, leaf = nn.Linear(1024, 1023), torch.empty(2, 2, 1024)
    assert split_pays([leaf], parameters=list(stage.parameters())) is False
    assert split_pays([leaf, torch.empty(8, 1)], parameters=list(stage.parameters())) is True


def total(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).sum()
    return out


class Choosy(nn.Linear):
    """What it passes on depends on values: how many rows, of which dtype, with a gradient or without."""

    def __init__(self, what: str) -> None:
        super().__init__(4, 4)
        self.what = what

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        if self.what == "a set":
            return out, frozenset((float(x.sum()),))
        if float(x.sum()) == 12:
            return out.detach() if self.what == "gradient" else out
        choices = {"rows": out[:2], "dtype": out.double(), "gradient": out, "number": (out, 2)}
        return choices[self.what]


class Takes(nn.Linear):
    def forward(self, x: Any) -> Tensor:
        return super().forward((x[0] if isinstance(x, tuple) else x).float())


@pytest.mark.parametrize(
    "what, message",
    [
        ("rows", r"tensor(size=(2, 4), requires_grad=True), but sent tensor(size=(3, 4), requires_grad=True)"),
        ("dtype", r"tensor(size=(3, 4), dtype=torch.float64, .*, but sent tensor(size=(3, 4), requires_grad=True)"),
        ("gradient", r"tensor(size=(3, 4), requires_grad=True), but sent tensor(size=(3, 4))"),
        ("number", r"(tensor(size=(3, 4), requires_grad=True), 2), but sent tensor(size=(3, 4), requires_grad=True)"),
        ("a set", r"(tensor.*, frozenset({3.0})), but sent .*frozenset({12.0}))"),
    ],
)
def test_shapes_or_numbers_that_depend_on_values_are_an_error(what: str, message: str) -> None:
    def main(world: World) -> None:
        world = world.over(Mesh((("pp", 2),)))
        schedule = lower(make_schedule("gpipe", pp=2, microbatches=2), gathers=False)
        model = nn.Sequential(Choosy(what), Takes(4, 4)).to(world.device)
        call = functools.partial(total, x=torch.ones(3, 4, device=world.device))
        cut = cut_model(model, stages=2, call=call, request=CutRequest("params"))
        stages = {world.rank: make_stage(model, cut=cut, index=world.rank)}
        storage = Plain()
        storage.did.append("gather")
        runtime = ScheduleInterpreter(stages, storages={world.rank: storage}, world=world)
        batches = [torch.ones(3, 4, device=world.device), torch.eye(4, device=world.device)[:3]]
        runtime.run(
            schedule, jobs={i: MicrobatchJob(functools.partial(total, x=x), x.shape) for i, x in enumerate(batches)}
        )

    message = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(StageError, match=f"stage 0 sends as 0, for micro-batch 1, {message}"):
        run(2, main)


def test_an_exception_of_one_stage_ends_all_ranks_with_its_own_message() -> None:
    model = gpt()

    def main(world: World) -> None:
        def fails(*_: Any) -> None:
            raise ZeroDivisionError("in block 5")

        world = world.over(Mesh((("pp", 2),)))
        schedule = lower(make_schedule("1f1b", pp=2, microbatches=MICROBATCHES), gathers=False)
        cut = cut_model(model, stages=2, call=first, request=CutRequest("params"))
        stage = make_stage(copy.deepcopy(model).to(world.device), cut=cut, index=world.rank)
        if world.rank == 1:
            stage.module.get_submodule("blocks.5").register_forward_pre_hook(fails)
        storage = Plain()
        storage.did.append("gather")
        ScheduleInterpreter({world.rank: stage}, storages={world.rank: storage}, world=world).run(
            schedule, jobs=jobs(range(8))
        )

    with pytest.raises(ZeroDivisionError, match="in block 5"):
        run(2, main)
