"""Run ranks as threads, each on a simulated accelerator: `run(4, main, on=SimulatedAccelerators())`.

Each rank has a device `cuda:RANK` made of memory of the CPU, and a `NcclWorld`, the world of GPUs, over communicators
that are as strict as NCCL. So the code for GPUs runs in a test without one. The test fails at a missing wait, at
memory that is used or freed too early, and at ranks that wait for each other:

    for timing in ("late", "early"):
        agree(run(4, main, on=SimulatedAccelerators(timing=timing))[0], expected, bound=1e-9)"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from accelerator import simulated_disk as simulated_disk  # noqa: PLC0414 - it changes the swap file
from accelerator.queued_work import WorkQueues
from accelerator.simulated_device import on_device
from accelerator.simulated_nccl import SimulatedNccl
from accelerator.simulated_streams import SimulatedHost, SimulatedStreams
from meshwise.comm.in_process.thread_and_trace_worlds import Rendezvous, ThreadWorld, run_threads
from meshwise.comm.network.nccl_world import Communicators, NcclWorld
from meshwise.pipeline.run import stage_forward


@dataclass(frozen=True)
class SimulatedAccelerators:
    """Runner of ranks on simulated accelerators, for `meshwise.testing.run`."""

    timing: Literal["late", "early", "random"] = "late"
    """When queued work of a stream runs: as late as a wait allows, as early as possible, or by chance in between."""
    seed: int = 0
    """Seed of the chances of `random`, and of copies from memory that is not pinned."""
    waits_at_launch: bool = False
    """Let the host wait for all queued work of the device before each operation, as CUDA may where it loads a kernel at
    its first launch. Copies from and to the host need no kernel."""
    watches: bool = True
    """Raise StreamRace at a race. False: a race shows only in the values."""

    def run(self, size: int, main: Callable[..., Any], *, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call `main(world, *args)` on `size` ranks, and return the results by rank; tensors of them on the CPU.

        Raises the first error of a rank: StreamRace, Deadlock, or an error of `main`."""
        lock, made = threading.Lock(), list[_Machine]()
        stage_forward._nan.cache_clear()  # it has tensors of the devices of earlier runs

        def rank_main(world: ThreadWorld) -> Any:
            with lock:
                made.extend([] if made else [_Machine(world.rendezvous, size, self)])
            return made[0].run(world, main, args)

        return run_threads(size, rank_main)


class _Machine:
    """Devices and communicators of one run."""

    def __init__(self, rendezvous: Rendezvous, size: int, setting: SimulatedAccelerators) -> None:
        self._queues = WorkQueues(rendezvous, timing=setting.timing, seed=setting.seed)
        self._host = SimulatedHost(self._queues)
        self._host.devices += [
            SimulatedStreams(
                self._host,
                rank=rank,
                watches=setting.watches,
                waits_at_launch=setting.waits_at_launch,
                modes=on_device,
            )
            for rank in range(size)
        ]
        self._nccl = SimulatedNccl(self._queues)

    def run(self, world: ThreadWorld, main: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run one rank to its end, with all work of its device."""
        streams = self._host.devices[world.rank]
        streams.select()
        with streams.modes():
            on_nccl = NcclWorld(
                rank=world.rank,
                mesh=world.mesh,
                device=streams.device,
                communicators=Communicators(self._nccl.backend(streams)),
            )
            result = main(on_nccl, *args)
            streams.synchronize()
            streams.races.check()
        self._queues.finish(world.rank)
        return result
