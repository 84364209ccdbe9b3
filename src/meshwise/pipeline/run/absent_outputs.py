"""Track which parts of a model's output other stages have computed and the last stage has not received.

A stage has NaN, of integers 0, in place of what it does not need (`stage.NanPlaceholder`). The loss never meets that:
the cut has seen what it uses. A prediction is all that the model returns, and what its loss leaves out would be NaN in
it. So from those values on the operations of a prediction are followed:

    | hidden[0] = embedding(x)      of another stage: absent
    | hidden[0].mean(1) · 2         absent
    | zeros_like(hidden[0])         there: nothing of it is used but its shape
    | hidden[0].new_empty(…)        absent where NaN is put into it, as a collective does that is no operation
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Self

import torch
from torch import Tensor

from meshwise.base.tensor_tree import tensors
from meshwise.model.dispatch_modes import TorchDispatchMode
from meshwise.pipeline.run.stage import NanPlaceholder

_SHOWN = 3
_OF_SHAPES = ("zeros", "ones", "full", "rand", "randn", "new")
"""How operations begin that take from a tensor no more than what it looks like."""

_UNFILLED = ("empty_like", "new_empty")
"""Those whose result somebody fills, who may be a collective."""


class AbsentOutputs(TorchDispatchMode):
    """Inside, what is made of that is followed."""

    supports_higher_order_operators = True

    def __init__(self, voids: Iterable[NanPlaceholder]) -> None:
        super().__init__()
        self._found: dict[int, weakref.ref[Tensor]] = {}
        self._voids = tuple(voids)

    def __enter__(self) -> Self:
        for void in self._voids:
            void.told = self._note
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for void in self._voids:
            void.told = None

    def names(self, output: Any) -> str:
        """Return the absent parts of an output in words, or "" if all is present."""
        names = [name or "its output" for name, x in _named(output, "") if self._is(x) and _shows(x)]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if any(map(self._is, tensors((args, kwargs)))):
            name = func.__name__.partition(".")[0]
            if name in _UNFILLED:
                if output.is_floating_point() or output.is_complex():
                    self._note(output)
            elif not (name.endswith("_like") or name.split("_")[0] in _OF_SHAPES):
                for x in tensors(output):
                    self._note(x)
        return output

    def _note(self, x: Tensor) -> None:
        self._found[id(x)] = weakref.ref(x)

    def _is(self, x: Tensor) -> bool:
        found = self._found.get(id(x))
        return found is not None and found() is x


def _shows(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or bool(torch.isnan(x).any())


def _named(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree, with what leads to each."""
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        inside = ((f"[{key!r}]", value) for key, value in tree.items())
    elif is_dataclass(tree) and not isinstance(tree, type):
        inside = ((f".{field.name}", getattr(tree, field.name)) for field in fields(tree))
    elif isinstance(tree, list | tuple):
        inside = ((f"[{index}]", value) for index, value in enumerate(tree))
    for step, value in inside:
        yield from _named(value, f"{name}{step}")
