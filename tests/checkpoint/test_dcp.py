"""A training goes on between plain torch and a plan through torch's distributed checkpoint (DCP): same losses."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

from checkpoint.cases import Case, loss
from free_port import free_port
from grid import Grid
from meshwise.checkpoint.checkpoint_format import DamageError
from meshwise.checkpoint.dcp_conversion import export_dcp, import_dcp
from meshwise.comm.api.world import World
from meshwise.comm.launch.fork_server import start_context
from meshwise.engine.parallelize import parallelize
from meshwise.reference import next_token_loss
from meshwise.testing import run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
UNEVEN, GRAPHIC = Case(), Case(heads=4)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
STEPS = 3


def plain(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = case._model()
    return model, case.optimizer(model.parameters(), **dict(case.options))


def train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for number in range(STEPS):
        batch = case.batches()[number % 2]
        output = model(batch[0] if case.heads else batch)
        total, count = next_token_loss(output, batch) if case.heads else loss(output, batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach() / count))
    return losses


def nested(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "epoch": 1}


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As torchtitan saves: the model's tensors at the top, and one key for each value of the optimizer."""
    train_state = {"step": torch.tensor(STEPS)}
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return {**model.state_dict(), "optimizer": state, "train_state": train_state}


def two_folders(state: Mapping[str, Any], folder: Path) -> None:
    """As accelerate saves."""
    save({"model": state["model"]}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    save({"optimizer": state["optimizer"]}, checkpoint_id=folder / "optimizer_0", no_dist=True)


def one_folder(state: Mapping[str, Any], folder: Path) -> None:
    save(dict(state), checkpoint_id=folder, no_dist=True)


FORMS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., None]]] = {
    "get_state_dict": (nested, one_folder),
    "torchtitan": (flat, one_folder),
    "accelerate": (nested, two_folders),
}
CASES: dict[str, Case] = {
    "uneven": UNEVEN,
    "gpt": GRAPHIC,
    "sgd": replace(UNEVEN, optimizer=torch.optim.SGD, options=(("lr", 1e-2), ("momentum", 0.9))),
    "sgd without state": replace(GRAPHIC, optimizer=torch.optim.SGD, options=(("lr", 1e-2),)),
    "nadam": replace(UNEVEN, optimizer=torch.optim.NAdam),
}


def go_on(world: World, case: Case, plan: str, source: Path, target: Path) -> list[float]:
    """Train on from a checkpoint under a plan, with a wrong learning rate that the checkpoint replaces, and save."""
    given = dict(case.options) | {"lr": 0.5}
    trainer = replace(case, options=tuple(given.items())).trainer(world, plan, seed=9)
    extra = trainer.load(source)
    assert extra in [{"steps": number * STEPS} for number in range(3)]
    losses = [trainer.step(case.batches()[number % 2]).loss for number in range(STEPS)]
    trainer.save(target)
    return losses


PLANS = {"dp=1": 1, "dp=3 zero=3": 3, "dp=2 zero=1": 2, "dp=2 tp=2 zero=3": 4, "pp=2 microbatches=2": 2}


WAYS = (
    *(("get_state_dict", "gpt", plan) for plan in PLANS),
    *(("get_state_dict", name, "dp=3 zero=3") for name in ("uneven", "sgd", "sgd without state", "nadam")),
    *((form, "uneven", "dp=3 zero=3") for form in ("torchtitan", "accelerate")),
    ("torchtitan", "gpt", "dp=2 tp=2 zero=3"),
)
MORE = (
    *(("get_state_dict", "gpt", plan) for plan in ("dp=1", "dp=3 zero=3", "dp=2 zero=1")),
    ("torchtitan", "gpt", "dp=2 tp=2 zero=3"),
)


@pytest.mark.grid(Grid({"way": WAYS}, heavy=lambda cell: cell["way"] in MORE))
def test_a_training_goes_from_torch_to_a_plan_and_back(way: tuple[str, str, str], tmp_path: Path) -> None:
    form, name, plan = way
    case, (tree, write) = CASES[name], FORMS[form]
    model, optimizer = plain(case)
    train(case, model, optimizer)
    write(tree(model, optimizer), tmp_path / "torch")
    index = import_dcp(tmp_path / "torch", into=tmp_path / "in")
    assert index.extra["steps"] == (0 if "sgd" in name else STEPS)

    paths = (tmp_path / "in", tmp_path / "out")
    losses = run(PLANS[plan], go_on, args=(case, plan, *paths))[0]
    assert losses == pytest.approx(train(case, model, optimizer), rel=1e-9, abs=1e-9)

    export_dcp(tmp_path / "out", into=tmp_path / "back", torchtitan=form == "torchtitan")
    again, other = plain(replace(case, options=(*case.options, ("lr", 0.5))))
    state = tree(again, other)
    for key in ("epoch", "train_state"):
        state.pop(key, None)
    # A parameter of no elements has no state in a checkpoint.
    reading = DefaultLoadPlanner(allow_partial_load=case.heads == 0)
    load(state, checkpoint_id=tmp_path / "back", planner=reading, no_dist=True)
    again.load_state_dict(state.get("model", {key: value for key, value in state.items() if key != "optimizer"}))
    set_optimizer_state_dict(again, other, state["optimizer"], options=FLAT if form == "torchtitan" else None)
    assert other.param_groups[0]["lr"] == 1e-2
    assert train(case, again, other) == pytest.approx(train(case, model, optimizer), rel=1e-9, abs=1e-9)


class Turning(nn.Module):
    """A layer with a complex matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.turn).abs()


def turning_step(model: Any) -> tuple[Tensor, float]:
    return model(torch.ones(2, 3, dtype=torch.float64)).square().sum(), 2.0


def trained_turning(world: World, folder: Path) -> None:
    def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return output.square().sum(), len(batch)

    trainer = parallelize(Turning(), "dp=2 zero=3", loss=squares, world=world, optimizer=torch.optim.Adam, lr=1e-2)
    for _ in range(2):
        trainer.step(torch.ones(2, 3, dtype=torch.float64))
    trainer.save(folder)


def test_complex_parameters_and_their_state_come_out_as_complex(tmp_path: Path) -> None:
    run(2, trained_turning, args=(tmp_path / "run",))
    export_dcp(tmp_path / "run", into=tmp_path / "out")
    plain_model, fresh = Turning(), Turning()
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (plain_model, fresh)]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        total, count = turning_step(model)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()

    for _ in range(2):
        step(plain_model, optimizers[0])
    state = {"model": fresh.state_dict(), "optimizer": get_optimizer_state_dict(fresh, optimizers[1])}
    load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    fresh.load_state_dict(state["model"])
    set_optimizer_state_dict(fresh, optimizers[1], state["optimizer"])
    for _ in range(2):
        assert float((fresh.turn - plain_model.turn).detach().abs().max()) < 1e-9
        step(plain_model, optimizers[0])
        step(fresh, optimizers[1])


def test_an_import_says_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(DamageError, match=r"expected a folder of .*, found no such file"):
        import_dcp(tmp_path, into=tmp_path / "in")
    model, optimizer = plain(UNEVEN)
    train(UNEVEN, model, optimizer)
    one_folder({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "numbered")
    with pytest.raises(ValueError, match=r"state for '0'.* save get_optimizer_state_dict\(model, optimizer\)"):
        import_dcp(tmp_path / "numbered", into=tmp_path / "in")
    assert not (tmp_path / "in").exists()


def test_a_missing_parameter_and_one_too_many_are_errors(tmp_path: Path) -> None:
    """Names without state of the optimizer may be buffers or other names of tied parameters, and nothing else."""
    model, _ = plain(UNEVEN)
    state = model.state_dict()
    one_folder({"model": {**state, "other.weight": torch.ones(2)}}, tmp_path / "more")
    one_folder({"model": {key: value for key, value in state.items() if key != "gain"}}, tmp_path / "less")
    for name, match in (("more", "has not: other.weight"), ("less", "lacks parameters that the model has: gain")):
        import_dcp(tmp_path / name, into=tmp_path / "in" / name)
        with pytest.raises(ValueError, match=match):
            run(1, go_on, args=(UNEVEN, "dp=1", tmp_path / "in" / name, tmp_path / "out"))


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_folder({"model": {f"weight{number}": torch.ones(1000) for number in range(40)}}, tmp_path / "torch")
    alive: list[weakref.ref[Tensor]] = []
    most: list[int] = []

    def counted(*sizes: Any, **options: Any) -> Tensor:
        made = empty(*sizes, **options)
        if made.numel() == 1000 and not made.is_meta:
            alive.append(weakref.ref(made))
            most.append(sum(one() is not None for one in alive))
        return made

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", counted)
    import_dcp(tmp_path / "torch", into=tmp_path / "in")
    export_dcp(tmp_path / "in", into=tmp_path / "back")
    assert len(most) >= 80
    assert max(most) <= 2


def shard(rank: int, port: int, folder: Path) -> None:
    """FSDP2 on two processes: load the export, train a step on the global batch, and save."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model, optimizer = plain(GRAPHIC)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), **dict(GRAPHIC.options))
    state: Any = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    load(state, checkpoint_id=folder / "back")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    losses = train(GRAPHIC, model, optimizer)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    save(state, checkpoint_id=folder / "sharded")
    if rank == 0:
        torch.save(losses, folder / "losses.pt")
    dist.destroy_process_group()


@pytest.mark.processes
def test_shards_of_fsdp2_are_read_and_written(tmp_path: Path) -> None:
    model, optimizer = plain(GRAPHIC)
    train(GRAPHIC, model, optimizer)
    one_folder(nested(model, optimizer), tmp_path / "torch")
    import_dcp(tmp_path / "torch", into=tmp_path / "in")
    export_dcp(tmp_path / "in", into=tmp_path / "back")
    start_context()  # its server blocks Ctrl-C, for later tests of this process too
    start_processes(shard, args=(free_port(), tmp_path), nprocs=2, start_method="forkserver")
    assert torch.load(tmp_path / "losses.pt") == pytest.approx(train(GRAPHIC, model, optimizer), rel=1e-9, abs=1e-9)
    import_dcp(tmp_path / "sharded", into=tmp_path / "again")
    losses = run(2, go_on, args=(GRAPHIC, "tp=2", tmp_path / "again", tmp_path / "out"))[0]
    assert losses == pytest.approx(train(GRAPHIC, model, optimizer), rel=1e-9, abs=1e-9)
