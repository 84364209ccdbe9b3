"""Parameter servers: workers push gradients, servers update parameters, and workers pull them (`ParameterServers`).

W workers have the rows of a batch. S servers each hold 1/S of every bucket, with the optimizer.

    | clock     number of a worker's step, from 1; a step that raises counts too
    | version   number of gradients that a server has applied to its shard
    | worker    step c: forward, backward, clip ─ push to each server ─ wait for parameters ─ step c + 1
    | server    apply a push as soon as it comes ─ answer when the slowest active worker has pushed step c - k

So the parameters for step c contain every worker's gradients up to step c - 1 - k; a worker checks that.
k is `staleness` (SSP, Ho et al., NIPS 2013); under `async` a server answers at once. A gradient is the mean over the
rows of one worker. `correction=dc:L` adds L g² (w_now - w_read) to it (DC-ASGD, Zheng et al., arXiv 1609.08326). For
this a server keeps the parameters that it has sent to each worker.

A worker whose step raises sends a header without values: it has left, and no worker waits for it until it pushes again.
Collectives of all ranks (evaluation, checkpoints) come after equally many steps of each rank, so no push is under way.
They bring every rank to the newest version (`pull`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim

from meshwise.comm.api.world import Work, wait_all
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.bucket_layout import BucketPlace
from meshwise.data_parallel.stage_engines import Engine
from meshwise.memory.chunked_update import ChunkedUpdate
from meshwise.plan import Plan


class ServedGradient(NamedTuple):
    """Gradient of step `clock` of a worker, for parameters of version `read`. Applying it made version `applied`."""

    worker: int
    clock: int
    read: int
    applied: int


def largest_staleness(log: Sequence[ServedGradient]) -> int:
    """Return the largest c - c' in a server's log: a gradient of step c was computed without a gradient of step c'.

    Under `staleness=k` it is at most k. Raises ValueError if a gradient or version is in the log twice."""
    made = {(row.worker, row.clock): row.applied for row in log}
    if len(made) < len(log) or len({row.applied for row in log}) < len(log):
        raise ValueError("a server's log has a gradient or a version twice")
    ages = (row.clock - clock for row in log for (_, clock), applied in made.items() if applied > row.read)
    return max(ages, default=0)


class _Kind(IntEnum):
    """Kind of a worker's message: a gradient, a step without an update, or a step that raised."""

    PUSH = 0
    SKIP = 1
    LEAVE = 2


class ParameterServers:
    """This rank's side of the exchange between workers and servers: every rank has one of these objects.

    | serving   True on a server
    | clock     number of steps of this rank so far
    | log       of a server, in the order of application, since the start of the training"""

    def __init__(
        self, engine: Engine, *, update: ChunkedUpdate, optimizer: optim.Optimizer, plan: Plan, wait: Callable[[], None]
    ) -> None:
        """`wait`: waits until a save in progress has copied its tensors."""
        self._engine, self._update, self._optimizer, self._wait = engine, update, optimizer, wait
        self._world, self._buckets = engine.world, engine.buckets
        self._bound = plan.staleness_bound
        self._factor = float(plan.correction.removeprefix("dc:")) if plan.correction != "none" else 0.0
        assert plan.dp is not None
        [self._axis] = plan.apart_axes
        self._workers, self._servers = range(plan.dp), range(plan.dp, plan.dp + plan.server)
        self.serving = self._world.group(self._axis).index in self._servers
        self.sums = [0.0, 0.0, 0.0]
        """Loss, its count, and squared norm of the mean gradient, of this worker's step; of a server, their sums."""
        self.received = 0
        """Number of messages that `sums` of a server adds up."""
        self._pushed = False
        self.log: list[ServedGradient] = []
        self._restart(clock=0, version=0)

    def _restart(self, *, clock: int, version: int) -> None:
        self.clock, self.version = clock, version
        self._done = dict.fromkeys(self._workers, clock)
        """Last step that each worker has ended."""
        self._left: set[int] = set()
        self._waiting: dict[int, int] = {}
        """Clock of each worker that waits for an answer."""
        self._read = dict.fromkeys(self._workers, version)
        self._sent: dict[int, list[Tensor]] = {}
        if self._factor and self.serving:
            self._sent = {worker: [each.owned_parameters.clone() for each in self._buckets] for worker in self._workers}

    # ---- a worker: the methods of `engine.step.StepAfterBackward` -------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a worker's step inside the block, and count it; send servers a message if it was skipped or raised."""
        self.clock, self._pushed = self.clock + 1, False
        try:
            yield
        except Exception:
            if not self._pushed:
                self._exchange(_Kind.LEAVE)
            raise
        if not self._pushed:
            self._exchange(_Kind.SKIP)

    def begin(self) -> None:
        """Do nothing: a worker updates no parameters, and each server checks its own update."""

    def apply(self, factor: float) -> None:
        """Push this worker's gradient times `factor`, and wait for the parameters of the next step."""
        self._engine.scale_gradients(factor)
        self._wait()  # a save in progress may still read the parameters
        self._exchange(_Kind.PUSH)

    def _exchange(self, kind: _Kind) -> None:
        """Send a message to each server, and receive the answers, unless the worker leaves."""
        self._pushed = True
        answers = [self._header([0.0, 0.0]) for _ in self._servers]
        works: list[Work] = []
        rows = [_row_codes(bucket) if kind is _Kind.PUSH else torch.empty(0) for bucket in self._buckets]
        for number, server in enumerate(self._servers):
            rates = [float(group["lr"]) for group in self._optimizer.param_groups]
            sent = [self._header([kind, self.clock, *self.sums, *map(len, rows), *rates])]
            for bucket, codes in zip(self._buckets, rows, strict=True) if kind is _Kind.PUSH else ():
                start, stop = bucket.place.shard(server)
                values = bucket.reduced_gradient[start:stop]
                if len(codes):
                    sent.append(codes)
                    values = values[_kept(bucket.place, codes)[start:stop]]
                sent += [values] if len(values) else []
            works += [self._world.send(each, axis=self._axis, to=server) for each in sent]
            if kind is not _Kind.LEAVE:
                parts = [bucket.whole[slice(*bucket.place.shard(server))] for bucket in self._buckets]
                works += [self._world.recv(each, axis=self._axis, source=server) for each in (answers[number], *parts)]
        wait_all(works)
        for answer in answers if kind is not _Kind.LEAVE and self._world.device.type != "meta" else ():
            slowest = int(answer.view(torch.float64)[1])
            if self._bound is not None and slowest < self.clock - self._bound:
                raise RuntimeError(
                    f"a server answered step {self.clock} when the slowest worker had ended step {slowest}, more than "
                    f"staleness={self._bound} steps before; this is a bug of meshwise"
                )

    def _header(self, numbers: Sequence[float]) -> Tensor:
        """Return numbers as a uint8 tensor. No other message has this dtype, so a server takes it from any worker."""
        return torch.tensor(numbers, dtype=torch.float64, device=self._world.device).view(torch.uint8)

    # ---- a server -------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until every worker has ended as many steps as this server."""
        self.clock += 1
        self.sums, self.received = [0.0, 0.0, 0.0], 0
        size = 5 + len(self._buckets) + len(self._optimizer.param_groups)
        self._answer_waiting()
        while min(self._done.values()) < self.clock:
            header = self._header([0.0] * size)
            sources = sorted(self._workers, key=self._done.__getitem__)
            worker = self._world.recv_any(header, axis=self._axis, sources=sources)
            self._receive(worker, header.view(torch.float64).tolist())
            self._answer_waiting()

    def _receive(self, worker: int, header: Sequence[float]) -> None:
        """Take the rest of a worker's message, and apply its gradient."""
        kind, clock, rows = _Kind(int(header[0])), int(header[1]), header[5 : 5 + len(self._buckets)]
        self._done[worker] = clock
        self._left.discard(worker)
        if kind is _Kind.LEAVE:
            self._left.add(worker)
            return
        self._waiting[worker] = clock
        self.sums = [before + new for before, new in zip(self.sums, header[2:5], strict=True)]
        self.received += 1
        if kind is _Kind.SKIP:
            return
        gradients = [self._gradient(bucket, worker, int(n)) for bucket, n in zip(self._buckets, rows, strict=True)]
        self._wait()
        for number, (bucket, gradient) in enumerate(zip(self._buckets, gradients, strict=True)):
            if self._factor:
                late = bucket.owned_parameters - self._sent[worker][number]
                gradient += self._factor * gradient * gradient * late.to(gradient.dtype)
            bucket.reduced = gradient
        for group, lr in zip(self._optimizer.param_groups, header[5 + len(rows) :], strict=True):
            group["lr"] = lr
        self._update.step(lambda _: None)
        self.version += 1
        self.log.append(ServedGradient(worker, clock, self._read[worker], self.version))

    def _gradient(self, bucket: Bucket, worker: int, rows: int) -> Tensor:
        """Receive the gradient of this server's shard of a bucket; 0 in rows that are not sent."""
        (start, stop), dtype = bucket.shard, bucket.storage.precision.master_of(bucket.dtype)
        kept = torch.ones(stop - start, dtype=torch.bool, device=bucket.device)
        if rows:
            codes = torch.empty(rows, dtype=torch.int64, device=bucket.device)
            self._world.recv(codes, axis=self._axis, source=worker).wait()
            kept = _kept(bucket.place, codes)[start:stop]
        values = torch.empty(int(kept.sum()), dtype=dtype, device=bucket.device)
        if len(values):
            self._world.recv(values, axis=self._axis, source=worker).wait()
        if not rows:
            return values
        return torch.zeros(stop - start, dtype=dtype, device=bucket.device).masked_scatter_(kept, values)

    def _answer_waiting(self) -> None:
        """Send the parameters to the waiting workers for which the bound is met."""
        # The last step that every active worker has ended; of all workers if all have left.
        slowest = min(self._done[worker] for worker in self._done.keys() - self._left or self._done)
        for worker, clock in list(self._waiting.items()):
            if self._bound is None or slowest >= clock - self._bound:
                del self._waiting[worker]
                self._read[worker] = self.version
                parts = [bucket.owned_parameters for bucket in self._buckets]
                if self._factor:
                    self._sent[worker] = [part.clone() for part in parts]
                for part in (self._header([self.version, slowest]), *parts):
                    self._world.send(part, axis=self._axis, to=worker).wait()

    # ---- all ranks ------------------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Bring every rank to the newest parameters (a collective); a worker reads this version in its next step."""
        self._wait()
        self._engine.publish()
        self._restart(clock=self.clock, version=self.version)

    def state(self) -> dict[str, Any]:
        """Return the JSON state of all servers: clock, versions and logs (a collective)."""
        servers = self._world.exchange((self.version, self.log), axes=self._axis)[self._servers.start :]
        versions, logs = zip(*servers, strict=True)
        return {"workers": len(self._workers), "clock": self.clock, "versions": versions, "logs": logs}

    def load_state(self, saved: Mapping[str, Any] | None) -> None:
        """Continue from the result of `state` when the tensors are loaded; None: from version 0.

        With another number of workers or servers, the log begins anew at the newest version."""
        versions = [0] if saved is None else saved["versions"]
        same = saved is not None and (saved["workers"], len(versions)) == (len(self._workers), len(self._servers))
        own = self._world.group(self._axis).index - self._servers.start
        self.log = [ServedGradient(*row) for row in saved["logs"][own]] if saved and same and self.serving else []
        version = versions[own] if same and self.serving else max(versions)
        self._restart(clock=0 if saved is None else saved["clock"], version=version)


def _row_codes(bucket: Bucket) -> Tensor:
    """Return the rows to send of parameters with sparse gradients in this step, as int64 numbers.

    For each parameter: -1 - i for its number i, then the element of the bucket where each nonzero row begins."""
    codes: list[Tensor] = []
    for index in sorted(bucket.sparse):
        piece = bucket.place.pieces[index]
        rows = bucket.reduced_gradient[piece.start : piece.stop].view(piece.shape[0], -1)
        used = (rows != 0).any(1).nonzero().flatten()
        codes += [used.new_full((1,), -1 - index), piece.start + used * rows.shape[1]]
    return torch.cat(codes) if codes else torch.empty(0, dtype=torch.int64, device=bucket.device)


def _kept(place: BucketPlace, codes: Tensor) -> Tensor:
    """Return a mask of the elements that are sent, (elements,): False in sparse rows without a code (`_row_codes`)."""
    kept = torch.ones(place.size, dtype=torch.bool, device=codes.device)
    for index in (-1 - codes[codes < 0]).tolist():
        piece = place.pieces[index]
        own = codes[(codes >= piece.start) & (codes < piece.stop)] - piece.start
        rows = kept[piece.start : piece.stop].view(piece.shape[0], -1)
        rows[:] = False
        rows[own // rows.shape[1]] = True
    return kept
