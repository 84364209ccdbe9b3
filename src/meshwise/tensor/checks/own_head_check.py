"""Check that parameters used between a pair's matrices, and only those, have their gradients summed.

Between the matrices of a pair a rank has some of the heads. A replicated parameter that is used there (a temperature,
the slope of an activation, a table of positions) gets a part of its gradient on every rank. On the hidden states it
gets all of it. Which it is shows in the first training forward, in the graph behind what the matrices are given:

    stream ── scale ── first ── inner ── slope ── second ── stream
                  └ nothing to sum           └ each_head: summed over the ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.tensor.core.part import Part
from meshwise.tensor.core.scheme import Axes
from meshwise.tensor.core.split_context import SplitContext
from meshwise.tensor.detect.known_names import of_all_blocks

Look = Callable[[str, Tensor, SplitContext], None]


def watch_heads(
    model: nn.Module,
    *,
    parts: Mapping[str, Part],
    context_of: Callable[[str, Part], SplitContext],
    entries: Mapping[str, SplitContext],
) -> None:
    """Look at what each matrix is given, the first time that it is given something trained. `entries`: the blocks where
    the stream begins, and what is outside of them.
    """
    modules = dict(model.named_modules())
    for name, part in parts.items():
        look = {"second": _inside, "first": _outside, "single": _outside, "head": _outside}.get(part.role)
        if look is not None and name in modules and not part.elsewhere:
            _look_once(modules[name], name, look=look, context=context_of(name, part))
    for name, outside in entries.items():
        _look_once(modules[name], name, look=_outside, context=outside)


def _look_once(matrix: nn.Module, name: str, *, look: Look, context: SplitContext) -> None:
    def before(_module: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        x = args[0] if args else given.get("hidden_states")
        if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
            handle.remove()
            look(name, x, context)

    handle = matrix.register_forward_pre_hook(before, with_kwargs=True)


def _inside(name: str, x: Tensor, context: SplitContext) -> None:
    axes = _axes(context)
    found = {each for each in context.origins.of(x, axes=axes) if not {*each.summed, *each.split}.issuperset(axes)}
    if not found:
        return
    names = sorted(each.name for each in found if each.name)
    rules = ", ".join(dict.fromkeys(f'"{of_all_blocks(each)}": "each_head"' for each in names))
    hint = (
        f"Where they are used between the matrices of a pair only, rules that work are {{{rules}}}"
        if len(names) == len(found)
        else "Hand it to the attention as an argument of its forward, or keep the module around the pair whole on "
        "every rank"
    )
    raise ValueError(
        f"{name} is given what was made of this rank's heads, or hidden features, and of "
        f"{', '.join(names) or 'something that is trained outside of the pair'}, which all ranks of tp have alike: "
        f"each gets a gradient of its own for it, and nobody would sum those. {hint}"
    )


def _outside(name: str, x: Tensor, context: SplitContext) -> None:
    axes = tuple(axis for axis in _axes(context) if axis not in context.scheme.tokens)
    for origin in context.origins.of(x, axes=axes) if axes else ():
        if origin.name and set(axes).intersection(origin.summed):
            raise ValueError(
                f"{name} is given what was made of {origin.name}, whose gradients are summed over the ranks of tp, as "
                "what each uses for its own heads, or hidden features; here all ranks use it alike, and the sum would "
                f'be too large. A rule that works is {{"{of_all_blocks(origin.name)}": "whole"}}, or "vector" for what '
                "has one number for each feature of the stream"
            )


def _axes(context: SplitContext) -> Axes:
    axes = context.scheme.apart
    return axes if context.degree(axes) > 1 else ()
