"""The numbers bar with stages, as closely as can be: every schedule with dropout and ties, three steps of AdamW with
clipping, float64; the loss, norm, every gradient and every parameter to 1e-9, on every rank; twelve rows, seven, and
two, which are fewer than there are micro-batches. What else is combined is in `test_grid.py`."""

import copy
import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import ThreadWorld
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.step_result import NonFiniteError
from meshwise.engine.trainer import Trainer
from meshwise.model.deferred_init import ParameterSource
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import Plan, PlanError
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, alone, outcome, run
from meshwise.train.loop import write_parameters
from reference.convolutional import ResNet
from warm_processes import Processes

BOUND = 1e-9


def gpt(*, tied: bool = False, dropout: float = 0.0) -> nn.Module:
    shape = GPTConfig(vocabulary=16, context=4, layers=3, heads=2, width=8, mlp_ratio=2, tied=tied, dropout=dropout)
    return GPT(shape).double()


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(16, (rows, 5), generator=generator) for rows in (12, 7, 2)]
    return [(tokens[:, :-1], tokens[:, 1:].clone()) for tokens in drawn]


def options() -> Options:
    return Options(clip_norm=0.5, example=batches()[0])


def trainer(world: World, plan: str, model: nn.Module | Callable[[], nn.Module]) -> Trainer:
    """Among threads cut by parameters: a cut by time takes some."""
    parsed = replace(Plan.parse(plan), partition="params") if isinstance(world, ThreadWorld) else plan
    return parallelize(model, parsed, world=world, loss=next_token_loss, options=options(), lr=1e-2, weight_decay=0.1)


def trained(world: World, plan: str, model: nn.Module | Callable[[], nn.Module]) -> Any:
    made = trainer(world, plan, model)
    steps = outcome(made, batches=batches())
    loss = made.evaluate(batches()).loss
    made.close()
    return steps, loss


@functools.cache
def expected(*, tied: bool, dropout: float) -> Any:
    model = functools.partial(gpt, tied=tied, dropout=dropout)
    return alone(model, batches=batches(), loss=next_token_loss, options=options(), lr=1e-2, weight_decay=0.1)


def check(plan: str, *, tied: bool, dropout: float = 0.0, on: Any = "threads") -> None:
    model = functools.partial(gpt, tied=tied, dropout=dropout)
    ranks = run(Plan.parse(plan).mesh().size, trained, on=on, args=(plan, model))
    for steps, loss in ranks:
        agree(steps, expected(tied=tied, dropout=dropout), bound=BOUND)
        assert loss == ranks[0][1]


VIRTUAL = {"interleaved": 2, "looped": 2, "zb-v": 2, "dualpipev": 2}


@pytest.mark.parametrize("name", ["looped", "dualpipev"])
def test_schedules_train_with_dropout_like_one_process(name: str) -> None:
    check(f"pp=2 microbatches=4 schedule={name} virtual_stages={VIRTUAL.get(name, 1)}", tied=True, dropout=0.3)


# The part has no grid of ranks here: cuts between them are in `test_cuts_with_tensor_parallelism`.
FEW = ("pp=4 microbatches=3", "pp=2 tp=4 tp_mode=2d microbatches=2")


@pytest.mark.grid(Grid({"plan": FEW}, heavy=lambda cell: cell["plan"] == FEW[1]))
def test_few_micro_batches_and_matrices_over_a_grid_train_like_one_process(plan: str) -> None:
    """What `test_grid` does not have."""
    check(plan, tied=False)


class Running(nn.Module):
    """A layer with a mean that follows its outputs, a count, and a table that is not part of its state."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + self.table
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
            self.count += 1
        return y - self.mean


def running() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Running(), nn.Linear(4, 4), Running()).double()


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), output.numel()


def buffers(world: World, plan: str, into: Path) -> dict[str, Tensor]:
    """What they are after two steps, on every rank; and the file of the model's parameters."""
    batch = torch.linspace(-1, 1, 24).double().reshape(6, 4)
    made = parallelize(running, plan, world=world, loss=squares, options=Options(example=batch), lr=1e-2)
    for _ in range(2):
        made.step(batch)
    write_parameters(made, path=None if world.rank else into, metadata={})
    return {name: value.clone() for name, value in made.full_buffers()}


@pytest.mark.parametrize("plan", ["pp=2", "pp=3", "pp=2 schedule=interleaved virtual_stages=2 microbatches=2"])
def test_buffers_of_all_stages_are_the_models(plan: str, tmp_path: Path) -> None:
    world, microbatches = Plan.parse(plan).mesh().size, Plan.parse(plan).microbatches
    one = run(1, buffers, args=(f"dp=1 microbatches={microbatches}", tmp_path / "one"))[0]
    assert one["1.count"] == 2 * microbatches
    for found in run(world, buffers, args=(plan, tmp_path / "all")):
        assert found.keys() == one.keys()
        agree(
            {name: value.double() for name, value in found.items()},
            {n: v.double() for n, v in one.items()},
            bound=BOUND,
        )
    files = [load_file(tmp_path / name) for name in ("all", "one")]
    assert files[0].keys() == files[1].keys() == running().state_dict().keys()
    agree({n: v.double() for n, v in files[0].items()}, {n: v.double() for n, v in files[1].items()}, bound=BOUND)


@pytest.mark.processes
def test_on_processes(processes: Processes) -> None:
    check("pp=2 dp=2 zero=2 microbatches=4", tied=True, dropout=0.3, on=processes)


def test_a_model_that_exists_is_the_first_ranks_on_all() -> None:
    model = gpt(tied=True)
    whole = alone(model, batches=batches(), loss=next_token_loss, options=options(), lr=1e-2, weight_decay=0.1)

    def main(world: World) -> Any:
        other = gpt(tied=True)
        if world.rank == 0:
            other.load_state_dict(model.state_dict())
        return trained(world, "pp=2 microbatches=2", other)

    for steps, _ in run(2, main):
        agree(steps, whole, bound=BOUND)


def test_a_prediction_is_on_every_rank() -> None:
    def main(world: World) -> Tensor:
        out: Tensor = trainer(world, f"pp={world.size}", gpt).predict(batches()[0])
        return out

    one = run(1, main)[0]
    for output in run(3, main):
        agree(output, one, bound=1e-12)


def test_a_checkpoint_of_a_pipeline_is_any_plans(tmp_path: Path) -> None:
    def main(world: World, plan: str, save: str, load: str) -> Any:
        made = trainer(world, plan, functools.partial(gpt, tied=True))
        if load:
            made.load(tmp_path / load)
        made.step(batches()[0])
        if save:
            made.save(tmp_path / save)
        made.step(batches()[1])
        return {name: value.clone() for name, value in made.full_parameters()}

    pipeline = "pp=2 dp=2 zero=1 microbatches=4 schedule=zb-v virtual_stages=2"
    run(4, main, args=(pipeline, "a", ""))
    of_one = run(1, main, args=("dp=1", "b", "a"))[0]
    for parameters in run(4, main, args=(pipeline, "", "a")):
        agree(parameters, of_one, bound=BOUND)
    again = run(1, main, args=("dp=1", "", "b"))[0]
    for parameters in run(2, main, args=("pp=2 microbatches=2", "", "b")):
        agree(parameters, again, bound=BOUND)


@pytest.mark.parametrize("ways", [("auto", "blocks"), ("blocks", "auto")], ids="-".join)
def test_a_checkpoint_of_one_cut_is_any_cuts(ways: tuple[str, str], tmp_path: Path) -> None:
    """Parameters and running statistics have the model's own names, however it is cut."""
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(4, 3, 4, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    model = functools.partial(ResNet, 1, norm=nn.BatchNorm2d)

    def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return output.square().sum(), len(output)

    def main(world: World, how: Any, *, load: bool) -> Any:
        options = Options(example=images[0], cut=CutOptions(how=how))
        plan = f"pp={world.size} microbatches=1"
        made = parallelize(lambda: model().double(), plan, world=world, loss=squares, options=options, lr=1e-2)
        if load:
            made.load(tmp_path / "a")
        else:
            made.step(images[0])
            made.save(tmp_path / "a")
        made.step(images[1])
        return dict(made.full_parameters()), {name: value.clone() for name, value in made.full_buffers()}

    whole = run(2, functools.partial(main, load=False), args=(ways[0],))[0]
    for size in (1, 3):
        for found in run(size, functools.partial(main, load=True), args=(ways[1],)):
            agree(found, whole, bound=BOUND)


def test_no_rank_computes_more_of_a_model_than_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[str]] = {}
    full = ParameterSource.full

    def noted(source: ParameterSource, name: str) -> Tensor:
        asked.setdefault(threading.current_thread().name, set()).add(name)
        return full(source, name)

    def main(world: World) -> tuple[set[str], set[str], int]:
        made = trainer(world, "pp=2 dp=2 tp=2 zero=3 microbatches=2", gpt)
        own = {name for name, _ in made.model.named_parameters()}
        return asked[threading.current_thread().name] & names, own, made.memory()["parameters"]

    names = {name for name, _ in gpt().named_parameters()}
    monkeypatch.setattr(ParameterSource, "full", noted)
    ranks = run(8, main)
    assert all(mine <= own < names for mine, own, _ in ranks)
    assert set.union(*(mine for mine, _, _ in ranks)) == names
    total = sum(parameter.numel() * parameter.itemsize for parameter in gpt().parameters())
    assert sum(size for _, _, size in ranks) < 1.3 * total


def test_a_value_that_is_not_finite_is_named_with_its_rank_and_micro_batch() -> None:
    def main(world: World) -> None:
        def poison(output: Tensor, batch: Any) -> tuple[Tensor, Any]:
            total, count = next_token_loss(output, batch)
            return total * (float("nan") if int(batch[0][0, 0]) == int(batches()[0][0][3, 0]) else 1.0), count

        made = parallelize(gpt, "pp=2 microbatches=12", world=world, loss=poison, options=options(), lr=1e-2)
        made.step(batches()[0])

    with pytest.raises(NonFiniteError, match=r"rank 1: head.weight \(micro-batch \d+\)"):
        run(2, main)


def test_errors_name_what_a_pipeline_needs() -> None:
    def main(world: World, plan: str, example: Any) -> None:
        parallelize(gpt, plan, world=world, loss=next_token_loss, options=Options(example=example), lr=1e-2)

    with pytest.raises(ValueError, match=r"pp=2: to be cut, the model must run once; .* Options\(example=batch\)"):
        run(2, main, args=("pp=2", None))
    with pytest.raises(
        ValueError, match=r"pp=2: .* give a loss function for trainer\.step \(pp allows no open_step\), and a"
    ):
        run(2, lambda world: parallelize(gpt, "pp=2", world=world, lr=1e-2))
    with pytest.raises(PlanError, match="needs at least virtual_stages=2"):
        run(2, main, args=("pp=2 microbatches=4 schedule=interleaved", batches()[0]))
    with pytest.raises(PlanError, match="at most pp·virtual_stages"):
        run(2, main, args=("pp=2 microbatches=4 schedule=looped virtual_stages=40", batches()[0]))


def test_autocast_in_the_models_forward_is_that_of_one_process_under_a_split_backward() -> None:
    def forward(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch[0]).float()

    def main(world: World, plan: str) -> Any:
        made = parallelize(
            lambda: gpt(tied=True).float(),
            plan,
            world=world,
            loss=next_token_loss,
            options=Options(example=batches()[0], forward=forward),
            lr=1e-2,
        )
        return [made.step(batch).loss for batch in batches()]

    one = run(1, main, args=("dp=1 microbatches=4",))[0]
    for losses in run(2, main, args=("pp=2 microbatches=4 schedule=zb-h1",)):
        assert losses == pytest.approx(one, rel=1e-6)


class _Brings(nn.Module):
    """Brings its input to where its own parameters are, of which the second stage has none, and asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.second = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens.to(self.embedding.weight.device))
        x = self.second(x.to(self.second.weight.device))
        places = torch.arange(x.size(1), device=x.device)
        x = x * 2 if bool((places > 2).any()) else x
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def test_a_model_may_move_its_input_to_the_device_of_its_parameters() -> None:
    settings: dict[str, Any] = {"loss": next_token_loss, "lr": 1e-2}
    model = _Brings().double()
    want = alone(copy.deepcopy(model), batches=batches(), **settings)

    def main(world: World) -> Any:
        chosen = Options(example=batches()[0], cut=CutOptions(at=("blocks.1",)))
        made = parallelize(copy.deepcopy(model), "pp=2 microbatches=2", world=world, options=chosen, **settings)
        return outcome(made, batches=batches())

    for found in run(2, main):
        agree(found, want, bound=BOUND)
