"""What a stage has in place of another stage's parameter: its shape and dtype can be asked for, and nothing computed.

A plain tensor without values would not do: torch multiplies by such a matrix on the CPU, without an error, and makes of
it whatever lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.pipeline.stage import StageError
from meshwise.tree import map_tensors, tensors


class Elsewhere(Tensor):
    """A parameter or a buffer that another stage holds. To compute with it raises StageError."""

    known_as: str
    """Its name in the model."""

    @staticmethod
    def named(name: str, *, like: Tensor) -> Elsewhere:
        """That of this name; `like`: without values."""
        one = like.detach().as_subclass(Elsewhere)
        one.known_as = name
        return one

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what asks for its shape; views of it, and what is made of nothing else, are elsewhere, too."""
        given = list(tensors((args, kwargs or {})))
        where = next((tensor.__dict__["known_as"] for tensor in given if isinstance(tensor, Elsewhere)), "")
        if any(not isinstance(tensor, Elsewhere) for tensor in given):
            raise StageError(
                f"a stage computes with {where}, which another stage holds and the example did not show it to need. "
                "Give it a second name in the module that reads it, as in self.shared = other.weight in its __init__, "
                "and read that; or cut by hand so that both are on one stage: Options(cut=Where(at=…)), model.cut_at "
                "of a job"
            )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            return map_tensors(lambda tensor: Elsewhere.named(where, like=tensor), found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Elsewhere:
        return self
