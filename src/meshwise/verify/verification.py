"""Verify that a model under a plan computes the same as on one process (`verify`).

A wrongly split model may still train: if a factor, a rank or a micro-batch is wrong, the loss only falls more slowly.
So `verify` compares the loss, every gradient and every parameter before a costly run."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.comm.launch.connect import connect
from meshwise.engine.first_rank import on_first_rank
from meshwise.engine.parallelize import parallelize
from meshwise.model.forward import Loss
from meshwise.optim.build_optimizer import needs_of
from meshwise.plan import Plan
from meshwise.sync.parameter_servers import largest_staleness
from meshwise.testing import largest_magnitude
from meshwise.verify.rounding_bounds import BoundedDifference, BoundJudge, VerificationInputs
from meshwise.verify.server_replay import ServerReplay
from meshwise.verify.step_comparison import ReferenceSide, ReplayedSide, StepComparison
from meshwise.verify.verification_report import SAME_MODEL, Divergence, Report

Contract: TypeAlias = Callable[..., tuple[str, Divergence | None]]
"""Check of a promise that a plan makes beside being the same model: a note, and the divergence if it is broken."""


def verify(
    model: nn.Module | Callable[[], nn.Module],
    loss: Loss,
    batches: Iterable[Any],
    plan: Plan | str,
    *,
    world: World | None = None,
    dtype: torch.dtype | None = torch.float64,
    **training: Any,
) -> Report:
    """Train a model for a few steps under a plan and on one process, and return a report on all differences.

    `model`, `loss`, `plan` and `training` (the optimizer, its arguments, the options) are as in `parallelize`. A module
    is copied first. `batches` are global batches, equal on every rank, one for each step.

    | world   default `connect()`. Every rank calls `verify` and gets the report. If the world has one rank and the plan
    |         needs more, the ranks are threads of this process
    | dtype   dtype to which model and batches are converted. They keep theirs if it is None, or if the plan has
    |         `precision=bf16` or `fp16`, in which both sides then compute

    Dropout and other draws with torch are equal under every plan, and are compared. With `random=local` in the plan, or
    random numbers that depend on the plan, the model is compared in eval mode, and the report says so. With a codec as
    `wire` or `gather`, the plan is compared without the codec. Then one step checks that the codec's gradient and
    errors add up to the true gradient, and one gather checks the parameters. Under a `sync` across steps, the change
    takes the place of the gradient. `OneBitAdam` is compared without a codec. Servers with `staleness` are compared at
    `staleness=0`; then they run late, and in float64 the gradients of their logs are applied in one process too.

    Raises PlanError when the plan does not fit the world. Raises ValueError without a batch, for a loss that does not
    return (sum, count), and when one batch gives two different losses. Raises any error of model and loss."""
    plan = Plan.of(plan)
    options = training.get("options")
    if options is not None and "join" in options.sync:  # here is only one job
        training["options"] = dataclasses.replace(options, sync={**options.sync, "join": "alone"})
    if needs_of(training.get("optimizer")) == "replicas":
        training["codec"] = "none"
    subject = VerificationInputs(model, loss, list(batches), dtype, training, plan)
    if subject.precision.compute_dtype is not None:
        subject = dataclasses.replace(subject, dtype=None)
    if not subject.batches:
        raise ValueError("batches is empty; give one global batch for each step to compare")
    world = world or connect()
    needed = 1 if plan.dp is None else plan.mesh().size
    if world.size == 1 < needed:
        return run_threads(needed, _verify, args=(subject,), timeout=None)[0]
    return _verify(world, subject)


def _verify(world: World, given: VerificationInputs, over: Divergence | None = None) -> Report:
    """Return the report. `over`: the difference over 1e-9 of a first run, for which this one measures the bounds."""
    subject, plan = given, given.plan
    trial = on_first_rank(lambda: subject.try_out(world.device), world=world)
    replayed = bool(plan.sync_axes) and plan.sync != "momenta"  # its rows are numbered anew, so draws differ
    evaluating = trial.random or bool(trial.pooled) or (replayed and bool(trial.drew))
    subject = dataclasses.replace(subject, evaluating=evaluating)
    judge = BoundJudge(subject.coarsest_dtype(trial), measured=over is not None)
    outputs = subject.listener()
    exact = dataclasses.replace(plan, wire="auto" if plan.codec else plan.wire, gather="exact")
    exact = dataclasses.replace(exact, staleness="0", correction="none") if plan.asynchronous else exact
    trainer = parallelize(subject.prepared(), exact, world=world, **subject.arguments(outputs))
    outputs.listen(*trainer.modules)
    references: list[ReferenceSide] = []
    replay = partial(ReplayedSide, trainer=trainer) if replayed else partial(ReferenceSide, device=world.device)
    on_first_rank(lambda: references.append(replay(subject, judge=judge)), world=world)
    reference = references[0] if references else None
    comparison = StepComparison(trainer, outputs=outputs, judge=judge, reference=reference)
    comparison.start()
    for number, batch in enumerate(subject.converted(), start=1):
        comparison.step(number, batch=batch)
    trainer.close()
    gap = math.inf if reference is None else reference.outputs[0].choices.smallest
    unexplained = world.exchange(None if gap <= judge.tie_gap else comparison.first)[0]
    if unexplained is not None and judge.exact and not replayed:
        return _verify(world, given, unexplained)
    first, figure = comparison.first, over and f"{over.what} differed by {over.figure.difference:.1e}"
    notes = [f"note: {figure}; the run was repeated, with bounds measured from rounding"] if over else list[str]()
    if replayed:
        notes.append(
            f"contract: replay. Replicas under sync={plan.sync} differ between agreements, so the plan was "
            "compared with replicas in one process: the mean of their parameters, and the first one's gradients"
        )
    notes += subject.notes(trial)
    if subject.training.get("codec") == "none":
        notes.append(f"note: {subject.training['optimizer'].__name__} was compared with codec='none'")
    inexact = plan.gather != "exact"
    late: Contract = partial(staleness_contract, judge=BoundJudge(judge.precision))
    contracts = {codec_contract: plan.codec, late: plan.asynchronous, gather_contract: inexact}
    if plan.asynchronous and trial.drew:  # the replay numbers each worker's rows from 0, as that of replicas
        subject = dataclasses.replace(subject, evaluating=True)
    for contract in (contract for contract, applies in contracts.items() if applies):
        note, broken = contract(subject, world=world)
        notes.append(note)
        first = first or broken
    if gap < math.inf:
        notes.append(f"note: routers chose by scores that were at least {gap:.1e} apart, relative to the largest")
    many = "s" * (len(subject.batches) > 1)
    report = Report(
        plan=str(trainer.plan),
        setting=f"{world.size} x {world.device.type}, {len(subject.batches)} step{many}, {judge}",
        notes=tuple(notes),
        steps=tuple(comparison.steps),
        parameters=tuple(comparison.parameters()),
        first=first,
        undecided=first is not None and gap <= judge.tie_gap,
        same_as=f"the same algorithm as {plan.dp} replicas in one process" if replayed else SAME_MODEL,
    )
    shared: Report = world.exchange(report if world.rank == 0 else None)[0]
    return shared


def codec_contract(subject: VerificationInputs, *, world: World) -> tuple[str, Divergence | None]:
    """Return a note on the codec of the plan, and the divergence if its contract is broken (collectives).

    All steps are run with the codec and without, from parameters that no step changes, without clipping. For every
    bucket, the sum of the gradients with the codec, and the errors after the last step, must equal the sum without.
    Replicas that agree across steps run one step, and their agreed parameters are compared in the same way. With
    feedback=0 no rank keeps errors, and nothing is checked."""
    plan, what = subject.plan, "change" if subject.plan.sync_axes else "gradient"
    note = f"note: wire={plan.wire} makes the training inexact; the plan was compared with wire=auto"
    if not plan.feedback:
        return f"{note}; feedback=0 keeps no errors, so no contract of the codec was checked", None
    true, coded = (_gradients(subject, dataclasses.replace(plan, wire=wire), world) for wire in ("auto", plan.wire))
    pairs = list(zip(coded, true, strict=True))
    largest = [float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)) for one, other in pairs]
    worst = max(world.exchange(max(largest, default=0.0)))
    rounding = max(world.exchange(max((torch.finfo(one.dtype).eps for one in true), default=0.0)))
    figure = BoundedDifference(worst, _ROUNDINGS * rounding, 1 if plan.sync_axes else len(subject.batches))
    note += f"; the codec's {what} and errors add up to the true {what}, at most {worst:.1e} apart (step {figure.step})"
    return note, Divergence(f"the sum of the codec's {what} and errors", figure.step, figure) if figure.over else None


def staleness_contract(
    subject: VerificationInputs, *, world: World, judge: BoundJudge
) -> tuple[str, Divergence | None]:
    """Train with the plan's staleness; return a note on the servers' logs, and the divergence if there is one.

    No parameters may be older than the bound. If `judge` is exact, the gradients of the logs are applied in one process
    too (`ServerReplay`)."""
    plan, steps = subject.plan, len(subject.batches)
    trainer = parallelize(subject.prepared(), plan, world=world, **subject.arguments(subject.listener()))
    for batch in subject.converted():
        trainer.step(batch)
    logs, found = trainer.update_log(), {name: value.clone() for name, value in trainer.full_parameters()}
    oldest = max(largest_staleness(log) for log in logs)
    bound = math.inf if plan.staleness_bound is None else plan.staleness_bound
    age = Divergence("the age of the parameters that a worker read", steps, BoundedDifference(oldest, bound, steps))
    note = (
        f"contract: the plan was compared with staleness=0. In a second run with staleness={plan.staleness}, "
        f"{sum(map(len, logs))} gradients were applied once each, and the parameters that a worker read were at "
        f"most {oldest} steps behind"
    )

    def replayed() -> list[Divergence]:
        replay = ServerReplay(subject, trainer=trainer, judge=judge)
        expected, divergences, nothing = replay.parameters(logs), [], torch.zeros((), dtype=torch.bool)
        least = judge.floor(max(map(largest_magnitude, expected.values()), default=0.0))
        for name, value in expected.items():
            own = torch.where(replay.undecided.get(name, nothing), value, found[name].to(value.device))
            figure = judge.measure(own, sides=[value], least=least, step=steps)
            divergences.append(Divergence(f"the value of {name} after the servers' log", steps, figure))
        return divergences

    differences = on_first_rank(replayed, world=world) if judge.exact else []
    if differences:
        apart = max(one.figure.difference for one in differences)
        mode = " in eval mode" * subject.evaluating
        note += f". Applied in one process{mode}, they give the same parameters, at most {apart:.1e} apart"
    trainer.close()
    return note, next((one for one in (age, *differences) if one.figure.over), None)


def gather_contract(subject: VerificationInputs, *, world: World) -> tuple[str, Divergence | None]:
    """Return a note on the gathered parameters, and the divergence if they break the contract (collectives).

    On every rank the gathered values must be the stored values after encoding and decoding, to the last bit."""
    trainer = parallelize(subject.prepared(), subject.plan, world=world, **subject.arguments(subject.listener()))
    wrong = lost = 0.0
    buckets = (bucket for unit in trainer.units for bucket in unit.buckets)
    for bucket, codec in ((bucket, each) for bucket in buckets if (each := bucket.codec) is not None):
        bucket.gather(exact=True).wait()
        stored = bucket.whole.to(torch.float64, copy=True)
        bucket.gather().wait()
        found = bucket.whole.to(torch.float64, copy=True)
        bucket.release_shard()
        rows = stored.to(torch.promote_types(bucket.dtype, torch.float32)).view(bucket.group.size, -1)
        expected = codec.decode(codec.encode(rows), elements=rows.shape[1], dtype=rows.dtype)
        wrong = max(wrong, float((found - expected.view(-1).to(bucket.dtype)).abs().max()))
        lost = max(lost, float((found - stored).abs().max() / stored.abs().max().clamp(min=1e-30)))
        bucket.free()
    trainer.close()
    wrong, lost = max(world.exchange(wrong)), max(world.exchange(lost))
    figure = BoundedDifference(wrong, 0.0, 1)
    return (
        f"note: gather={subject.plan.gather} makes the training inexact; the plan was compared with gather=exact; the "
        f"gathered parameters differ from the stored ones by at most {lost:.1e} of a unit's largest element"
    ), Divergence("the gathered parameters", 1, figure) if figure.over else None


def _gradients(subject: VerificationInputs, plan: Plan, world: World) -> list[Tensor]:
    """Return the sums of the gradients that this rank owns, by bucket, with the errors of a codec added.

    Of replicas that agree across steps, return the agreed parameters after a round of one step, less the errors."""
    arguments = subject.arguments(subject.listener())
    sync = {key: value for key, value in arguments["options"].sync.items() if key not in ("fragments", "delay")}
    arguments["options"] = dataclasses.replace(arguments["options"], clip_norm=None, sync=sync)
    trainer = parallelize(subject.prepared(), dataclasses.replace(plan, every=1), world=world, **arguments)
    scheme, buckets = trainer.scheme, [each for unit in trainer.units for each in unit.buckets if each.trainable]
    for group in trainer.optimizer.param_groups if scheme is None else ():
        group["lr"] = 0.0  # all steps begin with the same parameters
    found: list[Any] = [0.0] * len(buckets)
    for batch in itertools.islice(subject.converted(), None if scheme is None else 1):
        tokens = sum(trainer.world.exchange(trainer.step(batch).tokens, axes=plan.sync_axes))
        found = [total + bucket.owned_gradient() * tokens for total, bucket in zip(found, buckets, strict=True)]
    for number, bucket in enumerate(buckets):
        state = bucket.reduction_state
        if scheme is not None:
            found[number] = state.get("agreed", bucket.owned_parameters).clone()
        if "error" in state:
            found[number] += bucket.summed_state("error")
        if scheme is not None and "outer_error" in state:
            error = state["outer_error"].clone()
            trainer.world.all_reduce(error, axes=plan.sync_axes).wait()
            found[number] -= scheme.outer_lr * (1 + scheme.outer_momentum * scheme.nesterov) / tokens * error
    trainer.close()
    return found


_ROUNDINGS = 2**14
"""Allowed difference in units of the dtype's rounding error, relative to the largest element of a bucket."""
