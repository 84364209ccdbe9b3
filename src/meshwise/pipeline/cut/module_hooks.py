"""Hooks on the modules of a model that is cut into stages.

Torch calls a module's forward between two marks in the graph: a gradient that passes both is shown to backward hooks. A
stage sends what a piece's forward returns, which lies between the marks:

    stage 1     mark ── forward ──┬── mark      never passed: the gradient arrives between them
                                  └── sent ──►  received ── mark      stage 2

So backward hooks of pieces are taken off the modules of a stage, and the piece itself, where it computes, puts the
marks around what it sends. Modules that a stage has a part of have no such place, and hooks there are refused.

Forward hooks run on every stage, on what was received as on what was computed.
"""

from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.utils.hooks import BackwardHook

from meshwise.pipeline.cut.partition import CutError


class PieceBackwardHooks:
    """Backward hooks of a piece in a stage, where torch does not run them."""

    def __init__(self, module: nn.Module, *, computes: bool) -> None:
        """Take them off a module. `computes`: somewhere in this stage; elsewhere they are another stage's to call."""
        self._module = module
        self._before = list(module._backward_pre_hooks.values())
        module._backward_pre_hooks.clear()
        self._after: list[Callable[..., Any]] = []
        if module._is_full_backward_hook or not computes:  # one that is not hangs on the node that made the output
            self._after = list(module._backward_hooks.values())
            module._backward_hooks.clear()

    def around(self, forward: Callable[..., Any], *, args: Any, kwargs: Any) -> Any:
        """Return the result of `forward`, and show its gradients to the hooks as `nn.Module.__call__` does."""
        if not (self._after or self._before):
            return forward(*args, **kwargs)
        marks = BackwardHook(self._module, self._after, self._before)
        args = marks.setup_input_hook(args)
        return marks.setup_output_hook(forward(*args, **kwargs))


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether gradients are shown to hooks on this module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def refuse_hooks(model: nn.Module, *, pieces: Collection[str]) -> None:
    """Raise CutError for backward hooks on a module that several stages may run a part of, other than the model."""
    paths = (piece.split(".") for piece in pieces)
    shared = {".".join(path[:end]) for path in paths for end in range(1, len(path))}.difference(pieces)
    for name in sorted(shared):
        if has_backward_hooks(model.get_submodule(name)):
            raise CutError(
                f"{name} has backward hooks, but several stages may each run a part of it, none sees all gradients. "
                f"Put them on modules inside it, as {next(p for p in pieces if p.startswith(f'{name}.'))}"
            )
