"""Activations on disk between forward and backward give the same bits and take less memory."""

import errno
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise import testing
from meshwise.comm.api.streams import streams_of
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.memory.activation_offload import ActivationTier, ActivationTransfers, DiskMover, activation_tier
from meshwise.memory.activation_policy import MEASURED_STEPS
from meshwise.memory.swap_file import SwapConfig, SwapFile, TierError
from meshwise.plan import Plan
from warm_processes import Processes

CPU = torch.device("cpu")
ROWS, WIDTH = 32, 16


class Layer(nn.Module):
    """Saves one product under three views, an activation in place, and dropout's mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.three, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.three(x).chunk(3, -1)
        return x + self.drop(self.relu(self.back(a * torch.sigmoid(b) + c)))  # type: ignore[no-any-return]


def model(width: int = WIDTH, layers: int = 3) -> nn.Module:
    return nn.Sequential(*(Layer(width) for _ in range(layers)))


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return functional.mse_loss(output, batch.flip(-1), reduction="sum"), len(batch)


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))


def train(world: World, plan: str, folder: Path) -> tuple[Any, dict[str, Tensor], dict[str, int]]:
    options = Options(example=batch(), saving=ActivationTransfers(least=64, ahead=4096), swap=SwapConfig(folder=folder))
    trainer = parallelize(model, plan, loss=loss, world=world, lr=1e-2, options=options)
    numbers = [(result.loss, result.grad_norm) for result in (trainer.step(batch()) for _ in range(3))]
    values = {name: value.clone() for name, value in trainer.full_parameters()}
    memory = dict(trainer.memory())
    trainer.close()
    return numbers, values, memory


@pytest.mark.parametrize(
    "plan",
    ["dp=2 zero=1", "dp=2 zero=3 microbatches=2", "pp=2 microbatches=4 schedule=zb-h1", "dp=2 recompute=selective"],
)
def test_activations_on_disk_give_the_same_bits(plan: str, tmp_path: Path) -> None:
    run = functools.partial(testing.run, Plan.parse(plan).mesh().size, train)
    expected = run(args=(plan, tmp_path))[0]
    for found in run(args=(f"{plan} offload=activations:disk", tmp_path)):
        assert found[0] == expected[0]
        assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
        assert found[2]["disk/activations"] > 0
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_a_backward_in_two_parts_keeps_tensors_of_nodes_that_have_hooks(tmp_path: Path) -> None:
    """A norm saves numbers for each row, which are too small to be moved."""

    def main(world: World, plan: str) -> dict[str, Tensor]:
        options = Options(example=batch(), swap=SwapConfig(folder=tmp_path))
        blocks = lambda: nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), Layer(WIDTH)) for _ in range(3)))  # noqa: E731
        trainer = parallelize(blocks, plan, loss=loss, world=world, lr=1e-2, options=options)
        trainer.step(batch())
        values = {name: value.clone() for name, value in trainer.full_parameters()}
        trainer.close()
        return values

    plan = "pp=3 microbatches=2 schedule=zb-h1 partition=params"
    expected, found = (testing.run(3, main, args=(plan + more,))[0] for more in ("", " offload=activations:disk"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.threads("its ranks are on a CPU")
def test_on_a_cpu_activations_are_on_the_cpu(tmp_path: Path) -> None:
    """So the plan of a GPU runs on a laptop, and nothing is moved there."""
    assert activation_tier("cpu", streams=streams_of(CPU), swap=SwapConfig(), transfers=ActivationTransfers()) is None
    assert "cpu/activations" not in testing.run(1, train, args=("offload=activations:cpu", tmp_path))[0][2]


# ---- what moves --------------------------------------------------------------------------------------------------


def tier(folder: Path, **how: int) -> tuple[ActivationTier, DiskMover]:
    saving = ActivationTransfers(**{"least": 1024} | how)
    mover = DiskMover(SwapFile(folder), streams=streams_of(CPU), transfers=saving)
    return ActivationTier("disk", mover=mover, transfers=saving), mover


def test_a_storage_moves_once_and_parameters_and_small_tensors_stay(tmp_path: Path) -> None:
    """Of a layer: its input, the product of three views, what the second matrix reads, the sigmoid, relu, the mask."""
    away, mover = tier(tmp_path)
    layer = Layer(64)
    x = torch.randn(64, 64, requires_grad=True)
    unit = 64 * 64 * 4
    with away.saving(layer):
        output = layer(x)
    assert away.mover.peak % 4096 == 0
    assert 6 * unit <= away.mover.peak <= 8 * unit  # not 3 + 3 for the views of one product
    output.sum().backward()
    layer.drop.p = 0.0
    with away.saving(layer):
        moved = layer(x)
    (found,), (expected,) = (torch.autograd.grad(output.sum(), [x]) for output in (moved, layer(x)))
    assert torch.equal(found, expected)
    mover.close()


def test_places_in_the_file_are_used_again(tmp_path: Path) -> None:
    away, mover = tier(tmp_path)
    net, x = model(64), torch.randn(64, 64)
    sizes = []
    for _ in range(4):
        with away.saving(net):
            output = net(x)
        output.sum().backward()
        del output
        sizes.append(mover.file.size)
    assert sizes[1] == sizes[-1]
    mover.close()


def test_a_graph_without_a_backward_frees_its_places_in_the_file(tmp_path: Path) -> None:
    away, mover = tier(tmp_path)
    net = model(64)
    for _ in range(3):
        with away.saving(net):
            net(torch.randn(64, 64))
    peak = away.mover.peak
    with away.saving(net):
        net(torch.randn(64, 64))
    assert away.mover.peak == peak
    mover.close()


def test_a_tensor_that_is_written_to_is_saved_as_it_was(tmp_path: Path) -> None:
    """Two saves of one memory, with a write in between, are two."""
    away, mover = tier(tmp_path)
    x = torch.randn(64, 64, requires_grad=True)
    y = (x * 1).detach()
    with away.saving(nn.Identity()):
        first = x * y
        y.mul_(2)
        second = x * y
    (first + second).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, y / 2 + y)
    mover.close()


# ---- memory ------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process in memory now, but for those of the libraries' code: a system that is short of memory lets
    it go and reads it again."""
    kept, code = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            code = "x" in values[0]
        elif key == "Rss:" and not code:
            kept += int(values[0]) * 1024
    return kept


def grown(world: World, plan: str, folder: str) -> int:
    """By how much the process is larger between forward and backward."""
    width, rows, layers = 64, 16384, 6  # much to keep of little that is computed
    options = Options(saving=ActivationTransfers(ahead=1, staged=2**20), swap=SwapConfig(folder=Path(folder)))
    seen: list[int] = []

    def measured(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        seen.append(resident())
        return output.square().sum(), len(batch)

    trainer = parallelize(lambda: model(width, layers), plan, loss=measured, world=world, lr=1e-3, options=options)
    x = torch.randn(rows, width)
    trainer.step(x[:16])
    for _ in range(MEASURED_STEPS if "budget" in plan else 0):
        trainer.step(x)
    before = resident()
    trainer.step(x)
    return seen[-1] - before


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_a_process_is_smaller_by_what_is_on_disk_or_computed_again(processes: Processes, tmp_path: Path) -> None:
    plans = ("dp=1", "offload=activations:disk", "recompute=full", "recompute=selective", "budget=100M")
    plain, moved, inputs, products, chosen = (processes.run(1, grown, args=(plan, str(tmp_path)))[0] for plan in plans)
    unit = 16384 * 64 * 4
    passing = 6 * unit  # of the block that runs
    assert plain > 6 * 7 * unit
    assert moved < passing
    assert inputs < 6 * unit + passing
    assert products < 6 * 5 * unit + passing
    assert chosen < 100 * 2**20 + passing


# ---- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_full_disk_and_a_broken_one_raise_a_tier_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    net, x = model(64), torch.randn(64, 64)

    def step(away: ActivationTier) -> None:
        with away.saving(net):
            output = net(x)
        output.sum().backward()

    for call, meets, message in (
        ("posix_fallocate", full, "has no room for the swap file"),
        ("pwritev", broken, "cannot write a tensor of the swap file"),
        ("preadv", broken, "cannot read a tensor of the swap file"),
    ):
        away, mover = tier(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, meets)
            with pytest.raises(TierError, match=message):
                step(away)
        step(away)  # nothing is left of it
        mover.close()
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_a_tier_error(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="name an existing, writable folder on a disk"):
        activation_tier(
            "disk", streams=streams_of(CPU), swap=SwapConfig(folder=tmp_path / "gone"), transfers=ActivationTransfers()
        )


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_activations_leave_a_gpu(where: str, tmp_path: Path) -> None:
    device = torch.device("cuda")
    net, x = model(256, 6).to(device).eval(), torch.randn(4096, 256, device=device)
    away = activation_tier(
        where, streams=streams_of(device), swap=SwapConfig(folder=tmp_path), transfers=ActivationTransfers()
    )
    assert away is not None

    def gradients(moved: bool) -> tuple[list[Tensor], int]:
        net.zero_grad()
        if moved:
            with away.saving(net):
                output = net(x)
        else:
            output = net(x)
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
        output.sum().backward()
        return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None], allocated

    (expected, plain), (found, less) = gradients(moved=False), gradients(moved=True)
    assert all(map(torch.equal, found, expected))
    assert plain - less > 0.8 * away.mover.peak
    away.mover.close()
