"""Check the contract of a codec on the wire: what it applies and the errors that it keeps are the true gradient.

A codec makes training inexact, so the plan is compared with one process under `wire=auto`. This check covers the rest.
From equal parameters, one step is run with the codec and one without. For every bucket

    gradient with the codec + errors of all ranks / count = gradient without the codec

The clipping of `Options` is left out. Without feedback nothing keeps the errors, and nothing is checked.
"""

import dataclasses

import torch
from torch import Tensor

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.plan import Plan
from meshwise.verify.rounding_bounds import BoundedDifference
from meshwise.verify.verification_inputs import VerificationInputs
from meshwise.verify.verification_report import Divergence


def codec_contract(subject: VerificationInputs, *, plan: Plan, world: World) -> tuple[str, Divergence | None]:
    """Return a note on the codec of `plan`, and the divergence if its contract is broken (collectives)."""
    note = f"note: wire={plan.wire} makes the training inexact; the plan was compared with wire=auto"
    if not plan.feedback:
        return f"{note}; feedback=0 keeps no errors, so no contract of the codec was checked", None
    true, coded = (_gradients(subject, dataclasses.replace(plan, wire=wire), world) for wire in ("auto", plan.wire))
    pairs = list(zip(coded, true, strict=True))
    largest = [float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)) for one, other in pairs]
    worst = max(world.exchange(max(largest, default=0.0)))
    rounding = max(world.exchange(max((torch.finfo(one.dtype).eps for one in true), default=0.0)))
    figure = BoundedDifference(worst, _ROUNDINGS * rounding, 1)
    note += f"; the codec's gradient and errors add up to the true gradient, at most {worst:.1e} apart"
    return note, Divergence("the sum of the codec's gradient and errors", 1, figure) if figure.over else None


def _gradients(subject: VerificationInputs, plan: Plan, world: World) -> list[Tensor]:
    """Return the gradients of a first step that this rank owns, by bucket, with the errors of a codec added."""
    arguments = subject.arguments(subject.listener())
    options = dataclasses.replace(arguments["options"], clip_norm=None)
    trainer = parallelize(subject.prepared(), plan, world=world, **{**arguments, "options": options})
    tokens = trainer.step(next(subject.converted())).tokens
    found = []
    for bucket in (bucket for unit in trainer.units for bucket in unit.buckets if bucket.trainable):
        gradient = bucket.owned_gradient()
        if "error" in bucket.reduction_state:
            gradient = gradient + bucket.summed_state("error") / tokens
        found.append(gradient.clone())
    trainer.close()
    return found


_ROUNDINGS = 2**14
"""Allowed difference in units of the dtype's rounding error, relative to the largest element of a bucket."""
