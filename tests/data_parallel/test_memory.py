"""Test that memory falls as ZeRO promises (Rajbhandari et al., arXiv 1910.02054, section 5).

In fp32 one process needs 4 + 4 + 8 bytes per parameter."""

import ctypes
import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from joined_worlds import holds_together
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer
from meshwise.testing import run
from warm_processes import Processes

WIDTH, DEPTH, RANKS = 1024, 6, 4
"""Of a model that processes are measured with: large beside what an allocator keeps."""

SMALL = 128
"""The width where bytes are counted, not measured."""

# bytes per parameter: parameters, gradients, optimizer state (AdamW: two moments)
FORMULA = {
    0: (4, 4, 8),
    1: (4, 4, 8 / RANKS),
    2: (4, 4 / RANKS, 8 / RANKS),
    3: (4 / RANKS, 4 / RANKS, 8 / RANKS),
}

# Ranks that share memory hold one copy of the parameters between them as soon as they do not all update all of it.
SHARED = {zero: sizes if zero == 0 else (4 / RANKS, *sizes[1:]) for zero, sizes in FORMULA.items()}


def build(width: int, *, depth: int = DEPTH) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])


def parameters_of(width: int, *, depth: int = DEPTH) -> int:
    return depth * (width * width + width)


def unit_of(width: int) -> int:
    """Bytes of one unit: its fp32 parameters and its gradients."""
    return 8 * parameters_of(width, depth=1)


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def train(world: World, plan: str, width: int) -> Trainer:
    torch.set_num_threads(1)
    batch = torch.randn(RANKS, width, generator=torch.Generator().manual_seed(0))
    trainer = parallelize(partial(build, width), plan, loss=squares, world=world, lr=1e-3)
    for _ in range(2):
        trainer.step(batch)
    return trainer


def accounted(world: World, plan: str) -> tuple[dict[str, int], bool]:
    return train(world, plan, SMALL).memory(), holds_together(world)


def resident(world: World, plans: Sequence[str]) -> list[int]:
    """Bytes by which training made this process larger under each plan, free memory that is kept put aside."""
    train(world, "dp=4 zero=3", WIDTH).close()  # what any run needs once: threads, kernels, buffers of the collectives
    return [_grown(world, plan) for plan in plans]


def _grown(world: World, plan: str) -> int:
    before = _resident(world)
    trainer = train(world, plan, WIDTH)
    grown = _resident(world) - before
    trainer.close()
    return grown


def _resident(world: World) -> int:
    """Bytes of this process that are of no file; of what ranks share (they map each other's gradients), its part.

    Of a library's pages each process that has loaded it would have its part, and more the fewer they become."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    world.barrier(axes="rank")  # a rank that let go before the others have looked would leave its part to them
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    world.barrier(axes="rank")
    parts = [line.split()[1] for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    assert len(parts) == 2
    return sum(map(int, parts)) * 1024


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_model_state_is_the_formula(zero: int) -> None:
    for memory, together in run(RANKS, accounted, args=(f"dp={RANKS} zero={zero}",)):
        sizes = (SHARED if together else FORMULA)[zero]
        parameters, gradients, optimizer = (parameters_of(SMALL) * size for size in sizes)
        assert parameters <= memory["parameters"] <= 1.05 * parameters
        assert gradients <= memory["gradients"] <= 1.05 * gradients
        assert optimizer <= memory["optimizer"] <= 1.05 * optimizer
        assert memory["gathered_peak"] <= unit_of(SMALL)  # two units' parameters, without gradients


@pytest.mark.processes
def test_processes_are_no_larger_than_the_formula_and_two_units(processes: Processes) -> None:
    plans = [f"dp={RANKS} zero={zero}" for zero in SHARED]
    by_rank = run(RANKS, resident, on=processes, args=(plans,))
    for plan, sizes, *grown in zip(plans, SHARED.values(), *by_rank, strict=True):
        formula, unit = sum(sizes) * parameters_of(WIDTH), unit_of(WIDTH)
        # The training before may have left two free gradient buffers to this one.
        least, most = 0.9 * formula - unit, 1.05 * formula + 2 * unit
        assert least <= max(grown) <= most, (plan, [round(size / formula, 2) for size in grown])


def born(world: World) -> int:
    """Bytes that this process grew by at its largest while a model was born under zero=3."""
    torch.set_num_threads(1)
    build_deep = partial(build, WIDTH, depth=4 * DEPTH)
    parallelize(build_deep, "dp=4 zero=3", loss=squares, world=world).close()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _high_water()
    trainer = parallelize(build_deep, "dp=4 zero=3", loss=squares, world=world)
    peak = _high_water()
    trainer.close()
    return peak - before


def _high_water() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.processes
def test_no_rank_ever_holds_the_whole_model_while_it_is_born(processes: Processes) -> None:
    whole = 4 * parameters_of(WIDTH, depth=4 * DEPTH)  # of the deep model, in fp32
    state = whole // RANKS * 2  # this rank's shards of the parameters and of the gradients
    peaks = run(RANKS, born, on=processes)
    # One value at a time is 1/24 of the model. A rank that held the other ranks' parameters too would be at 5/4 of it,
    # one that held half of the model at 1; between state and there is room for what an allocator keeps.
    assert all(0.7 * state <= peak <= state + whole // 4 for peak in peaks), [round(p / whole, 2) for p in peaks]
