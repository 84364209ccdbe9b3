"""Ranks as threads of one process, for tests and notebooks: `run_threads` runs them, `ThreadWorld` is their World.

With processes a test starts slowly, is hard to debug and may hang. Here ranks are threads, which compute one at a time
(see `TurnTaking`) and exchange copies of their tensors:

    rank 0   all_reduce(x) ──┐ leaves a copy of x                 wait() ── until all have arrived,
    rank 1        all_reduce(x) ──┤                                       then takes its result from the copies
    rank 2             all_reduce(x) ──┴─ a PendingCollective: the record and the copy of each rank

Sums are computed in group order, and all ranks get the same bits. The state of every rank is known. So three errors are
reported at once, without a timeout: calls that disagree, a wait for a finished rank, and ranks that wait in a circle.

This world is stricter than others where c10d leaves the behaviour undefined. An output tensor is filled with 0xFF bytes
(NaN) until `wait`. Writing to a tensor of a collective before `wait` is an error. After a `reduce` the tensor is NaN on
all ranks but the target. `send` waits for its `recv`.

All tensors are on the CPU. On a GPU the backward of all ranks would share one autograd thread, and the first collective
in the backward would block all ranks. Grad mode, autocast and default device belong to a thread: each rank starts with
torch's defaults, and its changes do not affect other ranks. Default dtype and number of threads are global; they are
left unchanged. Within a rank, one thread at a time may call collectives."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import CallRecord, FlightRecorder
from meshwise.comm.api.world import Group, Work, World, keep_inference_mode
from meshwise.comm.in_process.rendezvous import PendingCollective, Rendezvous, RunEnded

Result = TypeVar("Result")
_Take: TypeAlias = Callable[[PendingCollective], None]


def run_threads(
    size: int, main: Callable[..., Result], *, args: Sequence[Any] = (), timeout: float | None = 60
) -> list[Result]:
    """Run `main(world, *args)` on `size` ranks, each a thread, over the mesh `rank=size`. Return the results by rank.
    timeout: seconds that a rank may wait in one collective while other ranks compute; None for no limit. When a rank
    raises an exception, the other ranks end at their collectives. The exception is raised here, with its traceback and
    a note that names the rank. Raises RanksDisagree when the calls of the ranks do not fit together. A rank that calls
    no collective cannot be ended: `timeout` seconds after a failure it is left running."""
    rendezvous = Rendezvous(size, timeout=timeout)
    results: dict[int, Result] = {}

    def rank_main(rank: int) -> None:
        try:
            with rendezvous.turn:
                results[rank] = main(ThreadWorld(rendezvous, rank=rank, mesh=Mesh.of(rank=size)), *args)
            rendezvous.finish(rank)
        except RunEnded:
            pass
        except BaseException as error:  # noqa: BLE001 — whatever ends one rank ends the run, and is raised below
            rendezvous.fail(error, rank=rank)

    rendezvous.threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    try:
        for thread in rendezvous.threads:
            thread.start()
        rendezvous.join()
    except BaseException:  # Ctrl-C
        rendezvous.abandon()
        raise
    if rendezvous.failure is not None:
        raise rendezvous.failure
    return [results[rank] for rank in range(size)]


class _GuardedTensors:
    """Check that the caller does not write to the tensors of one call before its `wait`."""

    def __init__(self, *, inputs: Sequence[tuple[Tensor, Tensor]], outputs: Sequence[Tensor]) -> None:
        """Fill the outputs with 0xFF bytes. inputs: each with a copy; an input that is also an output is an output."""
        self._outputs = [(x.view(torch.uint8), 1 if x.dtype == torch.bool else 0xFF) for x in outputs if x.numel()]
        filled = {x.data_ptr() for x, _ in self._outputs}
        self._inputs = [(x, copy) for x, copy in inputs if x.data_ptr() not in filled]
        for x, filling in self._outputs:
            x.fill_(filling)

    def check(self, record: CallRecord | None) -> None:
        """Raise RuntimeError when the caller has written to one of the tensors."""
        intact = all(bool(x.min() == filling) for x, filling in self._outputs)
        kept = (torch.equal(x, y) or torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in self._inputs)
        if not (intact and all(kept)):
            raise RuntimeError(f"a tensor was written to before wait(); until then it belongs to {record}")


class ThreadWorld(World):
    """World of one rank that is a thread; `run_threads` makes it."""

    medium = "threads"

    def __init__(
        self, rendezvous: Rendezvous, *, rank: int, mesh: Mesh, flight_recorder: FlightRecorder | None = None
    ) -> None:
        super().__init__(rank=rank, mesh=mesh, device=torch.device("cpu"), flight_recorder=flight_recorder)
        self.rendezvous = rendezvous

    def _move(self, record: CallRecord, group: Group, give: Mapping[int, Tensor], take: Mapping[int, Tensor]) -> Work:
        given = {x.data_ptr() for x in give.values()}

        def collect(met: PendingCollective) -> None:
            for index, target in take.items():
                met.place(target, index=index, part=group.index)

        fill = [x for x in take.values() if x.data_ptr() not in given]
        return self._meet(record, group, give=give, fill=fill, take=collect)

    def _reduce(self, record: CallRecord, group: Group, x: Tensor, how: tuple[int, str]) -> Work:
        target, op = how

        def take(met: PendingCollective) -> None:
            if group.index == target:
                met.reduce(op, into=x)

        return self._meet(record, group, give={0: x}, fill=[x], take=take)

    def _all_reduce(self, record: CallRecord, group: Group, x: Tensor, op: str) -> Work:
        def take(met: PendingCollective) -> None:
            x.copy_(met.reduced(op))

        return self._meet(record, group, give={0: x}, fill=[x], take=take)

    def _reduce_scatter(self, record: CallRecord, group: Group, parts: list[Tensor], how: tuple[Tensor, str]) -> Work:
        into, op = how

        def take(met: PendingCollective) -> None:
            met.reduce(op, into=into, part=group.index)

        return self._meet(record, group, give=dict(enumerate(parts)), fill=[into], take=take)

    def _barrier(self, record: CallRecord, group: Group) -> None:
        self._meet(record, group, take=lambda _: None).wait()

    def _meet(
        self,
        record: CallRecord,
        group: Group,
        *,
        take: _Take,
        give: Mapping[int, Tensor] = MappingProxyType({}),
        fill: Sequence[Tensor] = (),
    ) -> Work:
        """Call with copies of `give`, and return the work. At `wait`, `take` copies the results into `fill`."""
        copies = {x: x.clone() for x in dict.fromkeys(give.values())}  # one tensor may be for several ranks
        guarded = _GuardedTensors(inputs=list(copies.items()), outputs=fill)
        deposit = {part: copies[x] for part, x in give.items()}
        pending = self.rendezvous.meet(self.rank, ranks=group.ranks, record=record, deposit=deposit)
        collect = keep_inference_mode(partial(take, pending))

        def finish() -> None:
            guarded.check(record)
            self.rendezvous.wait(pending, rank=self.rank)
            collect()

        return Work(self, record=record, finish=finish)
