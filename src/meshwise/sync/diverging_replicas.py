"""Local SGD, SlowMo, DiLoCo, gossip, EASGD: replicas train apart, and `Replicas` mixes their parameters in rounds.

x_r: parameters of replica r. a: the last agreed parameters. n_r: sum of the loss counts of replica r in the round.
w_r = n_r / sum(n). A replica without an update in the round has weight 0; if no replica has one, nothing is applied.

    | begin, without outer step    send n_r x_r
    | begin, with outer step       send n_r (a - x_r)
    | apply, without outer step    x_r = sum(w_r x_r)
    | apply, with outer step       d = sum(w_r (a - x_r));  u = momentum u + d / s;  a = a - rate s v;
    |                              x_r = (1 - blend) a + blend x_r; `elastic`: with the old a
    | neighbours of a graph        x_r = sum over neighbours q of W[r, q] x_q

v is u, or d / s + momentum u in Nesterov's form. s is 1; under `scaled_by_lr` it is the mean of the learning rates at
the round's end, weighted by n_r. With a rate of 0 there is no momentum in this round.

docs/local_steps.md has the changes that are encoded with a codec as `wire`, and the bytes of a round. With the setting
`join`, the first replica sums its messages over the jobs that have joined, and gives the others the sums
(`JoinedJobs`)."""

import contextlib
import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

from meshwise.comm.api.flight_recorder import StepPhase
from meshwise.comm.api.world import Work, wait_all
from meshwise.comm.in_process.thread_and_trace_worlds import TraceWorld
from meshwise.comm.network.joined_jobs import JoinedJobs
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.checkpoint_slices import OPTIMIZER_KINDS, StoredSlice
from meshwise.data_parallel.gradient_reduction import ZERO, compressed
from meshwise.data_parallel.stage_engines import Engine
from meshwise.sync.sync_scheme import SyncScheme, mixing_weights


class _SentTensor(NamedTuple):
    """A weighted tensor on its way to the mean of all replicas."""

    target: Tensor
    total: Tensor
    work: Work


class Replicas:
    """The replicas of a plan whose parameters differ between agreements. Every rank has one of these objects.

    | steps    steps of this training; counts skipped steps too
    | moved    steps by which `steps` has changed when this job joined others, until a reader sets it to 0
    | index    number of this rank's replica, and `size` the number of replicas"""

    def __init__(
        self,
        engine: Engine,
        *,
        optimizer: optim.Optimizer,
        scheme: SyncScheme,
        axes: Sequence[str],
        wait: Callable[[], None],
    ) -> None:
        """`axes`: mesh axes along which replicas differ. `wait`: waits until a save in progress has made its copies."""
        self._engine, self._optimizer, self.scheme, self._wait = engine, optimizer, scheme, wait
        self._world, self._axes = engine.world, tuple(axes)
        group = self._world.group(self._axes)
        self.index, self.size = group.index, group.size
        self._reduction = compressed(ZERO[0], wire=scheme.wire, feedback=bool(scheme.feedback))
        unit_of = {row.name: number for number, unit in enumerate(engine.table.units) for row in unit.rows}
        self._fragments: list[list[Bucket]] = [[] for _ in range(scheme.fragments)]
        for bucket in engine.buckets:
            self._fragments[unit_of[bucket.place.pieces[0].row.name] % scheme.fragments].append(bucket)
        self._buckets = [bucket for fragment in self._fragments for bucket in fragment]
        alone = scheme.join in ("", "alone") or isinstance(self._world, TraceWorld)
        self.jobs = None if alone else self._joined()
        """The other jobs; None without the setting `join`, and in a rehearsal."""
        self.moved = 0
        self._connect()
        self._in_flight: dict[int, list[_SentTensor]] = {}
        """By fragment: a tensor for each bucket, the optimizer state if `state=mean`, and two numbers: the sum of the
        weights, and of the weights times the learning rates."""
        self._restart(0)

    def _connect(self) -> None:
        """Open the connections between neighbours (collective): two that both sent first would deadlock under NCCL."""
        graphs = {self.scheme.graph, f"groups:{self.scheme.group}"} - {"all", "groups:0"}
        rounds = range(self.size.bit_length())
        rows = [mixing_weights(graph, size=self.size, round_number=number) for graph in graphs for number in rounds]
        ranks = self._world.group(self._axes).ranks
        takes = [(giver, taker) for row in rows for taker, givers in enumerate(row) for giver in givers]
        self._world.prepare(lines={(ranks[giver], ranks[taker]) for giver, taker in takes if giver != taker})

    def _restart(self, steps: int) -> None:
        """Begin a first round after `steps` steps of the training: the present parameters count as agreed."""
        self.steps, self._mixed = steps, 0
        self._counts = [0.0] * self.scheme.fragments
        self._in_flight.clear()
        for bucket in self._buckets:
            for name in self.scheme.state_names:
                bucket.reduction_state[name].zero_()
            if self.scheme.has_anchor:
                bucket.reduction_state["agreed"].copy_(_master(bucket))

    # ---- a round ------------------------------------------------------------------------------------------------

    def after_step(self, count: float) -> None:
        """Run the exchanges that are due after a step. `count`: of the replica's loss; 0 if the step was skipped."""
        scheme, self.steps = self.scheme, self.steps + 1
        self._counts = [before + count for before in self._counts]
        begun, applied = scheme.fragments_to_begin(self.steps), scheme.fragments_to_apply(self.steps)
        in_groups = scheme.in_groups(self.steps)
        if not (begun or applied or in_groups):
            return
        self._wait()  # a skipped step ran no optimizer, which otherwise waits
        self._world.flight_recorder.doing = StepPhase.AGREE
        if in_groups:
            self._mix(f"groups:{scheme.group}")
        if scheme.graph != "all":
            self._mix(scheme.graph)
            self._mixed += 1
            begun = applied = ()
        for fragment in begun:
            self._begin(fragment)
        if self.jobs is not None:
            self._meet(self.jobs)
        for fragment in applied:
            if fragment in self._in_flight:  # not so if jobs have met, or the round was resumed with a longer delay
                self._apply(fragment)
        self._world.flight_recorder.doing = StepPhase.OUTSIDE

    def _begin(self, fragment: int) -> None:
        """Start to send a fragment, weighted by the counts of the round; add errors after an update."""
        count, self._counts[fragment] = self._counts[fragment], 0.0
        sent: list[_SentTensor] = []
        for bucket in self._fragments[fragment]:
            value = _master(bucket)
            if self.scheme.has_anchor:
                value = _on_device(bucket, "agreed") - value
            total = self._world.empty(value.numel(), dtype=value.dtype).copy_(value * count)
            error = bucket.reduction_state.get("outer_error")
            if error is not None and count:
                total.add_(error)
                error.zero_()
            state = {} if error is None else {"error": error}
            peers = dataclasses.replace(bucket.peers, outer=self._axes, shard=slice(0, len(total)), state=state)
            part = self._reduction.start_replicas(total, peers=peers)
            sent.append(_SentTensor(_master(bucket), part.values, part.work))
        if self.scheme.state == "mean":
            sent += [self._send(value * count, target=value) for value in self._common_state(fragment)]
        weights = torch.full((2,), count, dtype=torch.float64, device=self._world.device)
        weights[1] *= float(self._optimizer.param_groups[0]["lr"])
        self._in_flight[fragment] = [*sent, self._send(weights, target=weights)]

    def _send(self, value: Tensor, *, target: Tensor) -> _SentTensor:
        total = self._world.empty(value.numel(), dtype=value.dtype).copy_(value.view(-1))
        return _SentTensor(target, total, self._world.all_reduce(total, axes=self._axes))

    def _common_state(self, fragment: int) -> list[Tensor]:
        """Return the tensors of the optimizer's state that every replica has (a collective)."""
        found: list[dict[str, Tensor]] = []
        for parameter in self._slices(self._fragments[fragment]):
            state = self._optimizer.state.get(parameter, {}).items()
            found.append({key: it for key, it in state if isinstance(it, Tensor) and it.shape == parameter.shape})
        keys = self._world.exchange([sorted(state) for state in found], axes=self._axes)
        common = [set(own).intersection(*others) for own, *others in zip(*keys, strict=True)]
        return [state[key] for state, here in zip(found, common, strict=True) for key in sorted(here)]

    def _slices(self, buckets: Iterable[Bucket]) -> Iterator[nn.Parameter]:
        return (parameter for bucket in buckets for _, parameter in bucket.slices)

    def _apply(self, fragment: int) -> None:
        """Wait for the mean of a fragment, and apply it if any replica has updated its parameters."""
        *sent, weights = self._arrived(self._in_flight.pop(fragment))
        total, rates = (1.0, 1.0) if weights.total.is_meta else map(float, weights.total)
        buckets = self._fragments[fragment]
        if not total:
            return
        for bucket, one in zip(buckets, sent, strict=False):
            mean = one.total / total
            if self.scheme.has_anchor:
                self._outer_step(bucket, mean, lr=rates / total)
            else:
                one.target.copy_(mean)
            bucket.round_off()
        for one in sent[len(buckets) :]:
            one.target.copy_((one.total / total).view_as(one.target))
        if self.scheme.state == "reset":
            for parameter in self._slices(buckets):
                self._optimizer.state.pop(parameter, None)

    def _arrived(self, sent: list[_SentTensor]) -> list[_SentTensor]:
        wait_all(one.work for one in sent)
        return sent

    def _outer_step(self, bucket: Bucket, change: Tensor, *, lr: float) -> None:
        """Move the agreed parameters against the mean change of the replicas, and the own parameters to them."""
        scheme, state, master = self.scheme, bucket.reduction_state, _master(bucket)
        unit = lr if scheme.scaled_by_lr and lr else 1.0
        step = change = change / unit
        if scheme.outer_momentum and (lr or not scheme.scaled_by_lr):
            step = _on_device(bucket, "outer_momentum").mul_(scheme.outer_momentum).add_(change)
            state["outer_momentum"].copy_(step)
            if scheme.nesterov:
                step = change + scheme.outer_momentum * step
        before = _on_device(bucket, "agreed")
        agreed = before.sub(step, alpha=scheme.outer_lr * unit)
        master.copy_((before if scheme.elastic else agreed).lerp(master, scheme.blend))
        state["agreed"].copy_(agreed)

    def _mix(self, graph: str) -> None:
        """Mix the parameters of this replica with its neighbours' in a graph."""
        [axis] = self._world.group(self._axes).axes
        rows = mixing_weights(graph, size=self.size, round_number=self._mixed)
        takers = [replica for replica, row in enumerate(rows) if self.index in row and replica != self.index]
        own = rows[self.index]
        sent, works = [_master(bucket).clone() for bucket in self._buckets], []
        taken: list[list[tuple[float, Tensor]]] = [[(own[self.index], value)] for value in sent]
        for value, parts in zip(sent, taken, strict=True):
            works += [self._world.send(value, axis=axis, to=taker) for taker in takers]
            for giver in own.keys() - {self.index}:
                parts.append((own[giver], torch.empty_like(value)))
                works.append(self._world.recv(parts[-1][1], axis=axis, source=giver))
        wait_all(works)
        self._put(sum((w * value for w, value in parts[1:]), parts[0][0] * parts[0][1]) for parts in taken)

    def _put(self, values: Iterable[Tensor]) -> None:
        """Set the masters of this replica, one tensor for each bucket, and the parameters that the model uses."""
        for bucket, value in zip(self._buckets, values, strict=True):
            _master(bucket).copy_(value)
            bucket.round_off()

    # ---- other jobs ---------------------------------------------------------------------------------------------

    def _joined(self) -> JoinedJobs:
        """Return the connection of this job to the others."""
        world, facts = self._world, {key: str(value) for key, value in dataclasses.asdict(self.scheme).items()}
        address, patience, least = facts.pop("join"), float(facts["patience"]), int(facts.pop("least"))
        others = world.mesh.others(self._axes)
        facts["the split"] = " ".join(f"{axis}={world.mesh.degree(axis)}" for axis in others)
        rows = [(row.name, tuple(row.shape), str(row.dtype)) for row in self._engine.table.rows]
        layout = repr((rows, [(bucket.place.size, _master(bucket).dtype) for bucket in self._buckets]))
        facts["the parameters"] = f"{len(rows)} of digest {zlib.crc32(layout.encode()):08x}"
        lane = world.group(others).index if self.index == 0 else None
        return JoinedJobs(address, world=world, lane=lane, patience=patience, least=least, facts=facts)

    def join(self) -> None:
        """Join the other jobs, unless this job has (a collective). Wait for the end of a round of the other jobs."""
        while self.jobs is not None and self.jobs.rounds < 0:
            self._wait()
            self._meet(self.jobs)

    def _meet(self, jobs: JoinedJobs) -> None:
        """Sum what is in flight over the jobs and apply it; a job that has just come copies another job's state."""
        totals = [one.total for sent in self._in_flight.values() for one in self._arrived(sent)]
        weight = sum(float(sent[-1].total[0]) for sent in self._in_flight.values())
        found, own = jobs.meet(totals, steps=self.steps, weight=weight)
        if own in found.summing:
            for total in totals:
                self._world.broadcast(total, axes=self._axes).wait()
            for fragment in tuple(self._in_flight):
                self._apply(fragment)
        self._in_flight.clear()
        gives = found.joining and own == found.summing[0] and self.index == 0
        values = jobs.copied(list(self._values()) if gives else [], found=found, own=own)
        if own in found.joining and jobs.rounds >= 0:
            numbers = iter(range(self._world.exchange(len(values), axes=self._axes)[0]))
            self._take(self._world.exchange(values[n] if values else None, axes=self._axes)[0] for n in numbers)

    def _tensors(self) -> Iterator[Tensor]:
        """Yield parameters and outer state of this rank."""
        yield from (bucket.whole for unit in self._engine.units for bucket in unit.buckets if not bucket.trainable)
        for bucket in self._buckets:
            yield from (_master(bucket), *(bucket.reduction_state[name] for name in self.scheme.state_names))

    def _values(self) -> Iterator[Any]:
        """Yield the state of this rank as picklable values on the CPU: steps, `_tensors`, and the optimizer's state."""
        yield self.steps
        yield from (tensor.detach().to("cpu", copy=True) for tensor in self._tensors())
        for parameter in self._slices(self._buckets):
            state = self._optimizer.state.get(parameter, {}).items()
            yield {key: (it.device.type, it.cpu()) if isinstance(it, Tensor) else it for key, it in state}

    def _take(self, values: Iterator[Any]) -> None:
        """Replace the state of this rank by the `_values` of another job."""
        steps = next(values)
        self.moved, self.steps, self._counts = self.moved + steps - self.steps, steps, [0.0] * self.scheme.fragments
        for target, value in zip(self._tensors(), values, strict=False):
            target.copy_(value)
        for parameter, state in zip(self._slices(self._buckets), values, strict=True):
            for key, it in state.items():
                if isinstance(it, tuple):
                    state[key] = it[1].to("cpu" if it[0] == "cpu" else parameter.device)
            self._optimizer.state[parameter] = state
        self._put(map(_master, self._buckets))

    # ---- the mean -----------------------------------------------------------------------------------------------

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over the replicas (a collective), in new memory."""
        total = value.detach().clone(memory_format=torch.contiguous_format)
        if total.numel():
            self._world.all_reduce(total, axes=self._axes).wait()
        return total.div_(self.size)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the model's parameters by the mean of the replicas inside the block. Every rank calls it."""
        self._wait()
        own = [_master(bucket).clone() for bucket in self._buckets]
        self._put(map(self.mean, own))
        try:
            yield
        finally:
            self._put(own)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def slices_to_save(self, own: Iterable[StoredSlice]) -> Iterator[StoredSlice]:
        """Yield the slices of a checkpoint from the slices of this replica (collectives).

        The usual slots of parameters, errors and the optimizer's state have the mean of the replicas that have them.
        Slots that begin with `replica/` and a number have each replica's own. Others are of the first that has them."""
        self.settle()
        held = {(each.key, each.rectangle): each for each in own}
        shapes = {place: dataclasses.replace(each, tensor=each.tensor.to("meta")) for place, each in held.items()}
        found = self._world.exchange(shapes, axes=self._axes)  # a replica without an update has no optimizer state
        for place, shape in {place: each for shapes in reversed(found) for place, each in shapes.items()}.items():
            having = [number for number, shapes in enumerate(found) if place in shapes]
            each = held.get(place, shape)
            if place not in held:
                each = dataclasses.replace(shape, tensor=torch.zeros_like(shape.tensor, device=self._world.device))
            if place in held and _is_own(each.key):
                yield dataclasses.replace(each, slot=self._own_slot(each.slot))
            if _is_own(each.key) and each.slot.partition("/")[0] not in ("scalar", "number"):
                each = dataclasses.replace(each, tensor=self.mean(each.tensor).mul_(self.size / len(having)))
            if self.index == having[0]:
                yield each

    def own_tensors(self, tensors: Mapping[str, Any], *, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved tensors to load: this replica's own if the saved round continues, else the means.

        tensors: of a checkpoint, by slot and name. extra: its other values, with the result of `state`."""
        before, start = extra.get("sync"), self._own_slot("")
        if before is None or before["replicas"] != self.size or not self._goes_on(before):
            return dict(tensors)
        own = {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}
        return {key: tensor for key, tensor in tensors.items() if not _is_own(key)} | own

    def _own_slot(self, slot: str) -> str:
        return f"replica/{self.index}/{slot}"

    def settle(self) -> None:
        """Wait for the exchanges in flight, before a save or a load; their sums become state that a checkpoint has."""
        for fragment, sent in self._in_flight.items():
            for bucket, one in zip(self._fragments[fragment], self._arrived(sent), strict=False):
                bucket.reduction_state["outer_change"].copy_(one.total)

    def state(self) -> dict[str, Any]:
        """Return the JSON state of the round (a collective): steps, counts by replica, and weights in flight."""
        self.settle()
        counts = self._world.exchange(self._counts, axes=self._axes)
        counted = self._world.exchange([group.get("step") for group in self._optimizer.param_groups], axes=self._axes)
        flying = {str(fragment): list(map(float, sent[-1].total)) for fragment, sent in self._in_flight.items()}
        kept = {"replicas": self.size, "state": list(self.scheme.state_names), "steps": self.steps, "counts": counts}
        units = {"scaled_by_lr": self.scheme.scaled_by_lr, "timing": [self.scheme.every, self.scheme.delay]}
        return {**kept, **units, "mixed": self._mixed, "in_flight": flying, "group_steps": counted}

    def _goes_on(self, saved: Mapping[str, Any]) -> bool:
        """Return whether this scheme can continue the round of a result of `state`."""
        scheme, timing = self.scheme, [self.scheme.every, self.scheme.delay]
        differ = {*saved["state"]} ^ {*scheme.state_names}
        same = differ <= {"outer_error"} and len(saved["counts"][0]) == scheme.fragments
        same = same and saved["scaled_by_lr"] == scheme.scaled_by_lr
        return same and (not saved["in_flight"] or saved["timing"] == timing)

    def load_state(self, kept: Mapping[str, Any]) -> None:
        """Continue a round when the tensors are loaded. `kept`: the `extra` values of the checkpoint.

        With another number of replicas, all begin with the mean, and the counts of the round are shared evenly. Under a
        scheme with other outer state, or other steps of an exchange in flight, all begin a new round with the mean."""
        self._in_flight.clear()
        saved, self.moved = kept.get("sync"), 0
        if self.jobs is not None:
            self.jobs.rounds = -1
        if saved is None or not self._goes_on(saved):
            self._restart(int((saved or kept)["steps"]))
            return
        self.steps, self._mixed = int(saved["steps"]), int(saved["mixed"])
        same = saved["replicas"] == self.size
        totals = [sum(each) / self.size for each in zip(*saved["counts"], strict=True)]
        self._counts = list(saved["counts"][self.index]) if same else totals
        for group, step in zip(self._optimizer.param_groups, saved["group_steps"][self.index * same], strict=True):
            group.update({"step": step} if same and step else {})  # LAMB counts its steps there
        for bucket, name in itertools.product(self._buckets, self.scheme.state_names):
            value = _on_device(bucket, name)
            factor = saved["replicas"] / self.size if name == "outer_error" else 1.0  # all errors add up as before
            # A parameter that was frozen when the checkpoint was saved has no `agreed` there, which shows as NaN.
            bucket.reduction_state[name].copy_(torch.where(value.isnan(), _master(bucket), value * factor))
        for fragment, weights in saved["in_flight"].items():
            sent = [
                _SentTensor(_master(bucket), _on_device(bucket, "outer_change").clone(), Work())
                for bucket in self._fragments[int(fragment)]
            ]
            total = torch.tensor(weights, dtype=torch.float64, device=self._world.device)
            self._in_flight[int(fragment)] = [*sent, _SentTensor(total, total, Work())]


def _is_own(key: str) -> bool:
    """Return whether replicas have different values of the tensor with this slot and name."""
    return key.partition("/")[0] in ("parameter", *OPTIMIZER_KINDS) or key.startswith("reduction/outer_error/")


def _on_device(bucket: Bucket, name: str) -> Tensor:
    """Return an outer state of a bucket from its tier; on the device already, the state itself."""
    return bucket.reduction_state[name].to(bucket.device)


def _master(bucket: Bucket) -> Tensor:
    """Return the unrounded parameters of a bucket, (elements,)."""
    assert bucket.master is not None
    return bucket.master
