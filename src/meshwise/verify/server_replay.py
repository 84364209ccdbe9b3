"""Replay the logs of parameter servers with stale gradients in one process, on whole parameters, for `verify`.

A row of a server's log says which version of its parameters a worker had read for a gradient. So each gradient can be
computed again from the parameters that the worker had read, and applied in the order of the log."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from meshwise.base.mesh import even_split
from meshwise.base.tensor_tree import row_count, take_rows
from meshwise.engine.trainer import Trainer
from meshwise.sync.parameter_servers import ServedGradient
from meshwise.testing import ReferenceRun
from meshwise.verify.rounding_bounds import BoundJudge, VerificationInputs

Named = Mapping[str, Tensor]


class ServerReplay:
    """Reference runs: one for the worker, and one for each server. A server's is valid in the elements that it owns.

    These take the memory of 1 + servers models, and a copy of the parameters for each gradient on each server.

    undecided: masks, by name, of elements whose updates rounding may have decided (`BoundJudge.add_undecided`)"""

    def __init__(self, subject: VerificationInputs, *, trainer: Trainer, judge: BoundJudge) -> None:
        arguments = {**subject.arguments(subject.listener()), "device": trainer.world.device}
        plan, self._batches, self._judge = trainer.plan, list(subject.converted()), judge
        self.undecided: dict[str, Tensor] = {}
        self._clip, self._workers = subject.options.clip_norm, plan.dp or 1
        self._late = float(plan.correction.removeprefix("dc:")) if plan.correction != "none" else 0.0
        self._worker, *self._servers = (ReferenceRun(subject.prepared(), **arguments) for _ in range(1 + plan.server))
        self._owned: dict[str, list[tuple[int, int]]] = {}
        """Elements of each parameter that each server owns: (first, one after the last)."""
        for bucket in (bucket for unit in trainer.units for bucket in unit.buckets):
            place = bucket.place
            shards = [place.shard(rank) for rank in range(place.ranks_without_shard, bucket.group.size)]
            for piece in place.pieces:  # the part of each shard that lies in this parameter, from the parameter's start
                inside = [[min(max(at, piece.start), piece.stop) - piece.start for at in shard] for shard in shards]
                self._owned[piece.row.name] = [(first, last) for first, last in inside]

    def parameters(self, logs: Sequence[Sequence[ServedGradient]]) -> Named:
        """Return the parameters after all gradients of the servers' logs.

        Raises ValueError if a row says that a worker read a version before it existed."""
        versions = [[_copied(run.masters)] for run in self._servers]
        reads = {(row.worker, row.clock, at): row.read for at, log in enumerate(logs) for row in log}
        gradients: dict[tuple[int, int], Named] = {}
        left = [list(log) for log in logs]
        while any(left):
            before = sum(map(len, left))
            for at in (at for at, log in enumerate(left) if log):
                row = left[at][0]
                seen = [reads[row.worker, row.clock, other] for other in range(len(versions))]
                if any(version >= len(made) for version, made in zip(seen, versions, strict=True)):
                    continue  # another server applies a gradient first
                if (row.worker, row.clock) not in gradients:
                    read = [made[version] for version, made in zip(seen, versions, strict=True)]
                    gradients[row.worker, row.clock] = self._gradient(self._joined(read), row)
                self._apply(at, gradients[row.worker, row.clock], versions[at][row.read])
                versions[at].append(_copied(self._servers[at].masters))
                del left[at][0]
            if sum(map(len, left)) == before:
                raise ValueError("a server's log says that a worker read parameters before they were made")
        return self._joined([made[-1] for made in versions])

    def _joined(self, values: Sequence[Named]) -> Named:
        """Return whole parameters; each element is the one of the server that owns it."""
        joined = {name: value.clone(memory_format=torch.contiguous_format) for name, value in values[0].items()}
        for (name, whole), (own, of_server) in itertools.product(joined.items(), enumerate(values)):
            first, last = self._owned[name][own]
            whole.view(-1)[first:last] = of_server[name].reshape(-1)[first:last]
        return joined

    def _gradient(self, read: Named, row: ServedGradient) -> Named:
        """Return the clipped mean gradient of a worker's rows, from the parameters that it had read."""
        with torch.no_grad():
            for name, master in self._worker.masters.items():
                master.copy_(read[name])
        batch = self._batches[row.clock - 1]
        start, stop = even_split(row_count(batch), self._workers)[row.worker]
        self._worker.backward(take_rows(batch, start=start, stop=stop))
        for name, gradient in self._worker.gradients():
            self._worker.masters[name].grad = gradient.to_dense()
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._worker.masters.values(), self._clip)
        gradients = {name: gradient.clone() for name, gradient in self._worker.gradients()}
        self._judge.add_undecided(self.undecided, sides=[gradients])
        return gradients

    def _apply(self, server: int, gradient: Named, read: Named) -> None:
        run = self._servers[server]
        for name, master in run.masters.items():
            late = master.detach() - read[name]
            master.grad = gradient[name] + self._late * gradient[name].square() * late
        run.optimizer.step()


def _copied(parameters: Mapping[str, nn.Parameter]) -> Named:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
