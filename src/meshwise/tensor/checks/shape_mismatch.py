"""A forward that stumbles over the part it is given, and what to change about it.

Under tensor parallelism a model's own code runs on this rank's heads, features or tokens. Code that counts all of them
(a constant in a view, a mask as long as a block's input) fails deep inside with a message about two sizes. That is said
in the words of the model: where it happened, what a rank has there, and what would work.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn

from meshwise.plan import Plan, PlanError
from meshwise.tensor.core import activation_reshard as region
from meshwise.tensor.core.linear import ShardedLinear
from meshwise.tensor.detect.known_names import branch_around, of_all_blocks

_OF_SIZES = re.compile(r"\b(sizes?|shapes?|dim(ension)?s?|stride|broadcast\w*|numel|elements)\b", re.IGNORECASE)
_OURS = str(Path(__file__).parents[2])
_TORCHS = str(Path(torch.__file__).parent)
_KINDS = (RuntimeError, ValueError, AssertionError)
"""What torch and Python raise about sizes. A class of the model's own says something else."""


@contextlib.contextmanager
def misfits_told(model: nn.Module, *, plan: Plan) -> Iterator[None]:
    """Inside, the forward of a split model runs. Raises PlanError in place of an error about sizes."""
    try:
        yield
    except PlanError:
        raise
    except _KINDS as error:
        place = _place(model, error.__traceback__)
        if place is None or type(error) not in _KINDS or not _about_sizes(error):
            raise
        raise PlanError(_told(error, plan=plan, name=place[0], frame=place[1], line=place[2])) from error


def _about_sizes(error: Exception) -> bool:
    said = str(error)
    return _OF_SIZES.search(said) is not None or (isinstance(error, AssertionError) and not said)


def _place(model: nn.Module, trace: TracebackType | None) -> tuple[str, FrameType, int] | None:
    """Return the innermost line of the model's own code, and the innermost module with others inside. Return None where
    no code of the model was running, and for a model that is not split.
    """
    if not any(isinstance(module, ShardedLinear) or region.changes(module) for module in model.modules()):
        return None
    names = {module: name for name, module in model.named_modules()}
    found = None
    name = ""
    for frame, line in traceback.walk_tb(trace):
        itself = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if isinstance(itself, nn.Module) and itself in names and next(itself.children(), None) is not None:
            name = names[itself]
        if not frame.f_code.co_filename.startswith((_OURS, _TORCHS)) and isinstance(itself, nn.Module):
            found = (name, frame, line)
    return found


def _told(error: Exception, *, plan: Plan, name: str, frame: FrameType, line: int) -> str:
    code = frame.f_code
    said = " ".join(str(error).split()) or "an assertion does not hold"
    grid, sequence = plan.tp_mode != "1d", plan.sequence_parallel == 1
    has = ["of the heads, or hidden features, between the matrices of a pair"]
    do = ["let -1, x.size(…) or an attribute such as self.num_heads count what is there, not a constant"]
    if sequence:
        has.append("of the tokens from the first block to the last")
        do.append("make masks and positions outside of the blocks, for all tokens, and hand them over")
    if grid:
        has.append("of the features of the stream")
        do.append("take what is added to the stream from an nn.Embedding or an nn.Parameter")
    plainer = " ".join(word for word in ("tp_mode=1d" * grid, "sequence_parallel=0" * sequence) if word)
    branch = of_all_blocks(branch_around(name))
    rule = f'the rule {{"{branch}": "whole"}}, which keeps that whole on every rank' if name else ""
    if plainer or rule:
        do.append(f"or take {plainer}{', if need be with ' if plainer and rule else ''}{rule}")
    return (
        f"{name or 'the model'} cannot be run on the part that '{plan}' gives a rank: {type(error).__name__}: {said}, "
        f"in {Path(code.co_filename).name}:{line}, {linecache.getline(code.co_filename, line).strip()!r}. A rank has "
        f"a part {', and '.join(has)}. So {'; '.join(do)}. (With tp=1 the same error is one of the model and its "
        "batch.)"
    )
