"""Call the backward hooks of modules in a model that is cut into stages.

Torch puts two marks (`BackwardHook`) in the graph around a module's forward. The module's backward hooks see a gradient
that passes both marks. But a stage sends the output of a piece's forward from between the marks:

    stage 1     mark ── forward ──┬── mark      never passed: the gradient arrives between them
                                  └── sent ──►  received ── mark      stage 2

So a stage removes the backward hooks from its pieces. For a piece that it computes, it puts both marks inside the
forward; then the sent output lies behind the second mark. Backward hooks on a module that contains pieces of several
stages are refused, because no stage sees all gradients of the module.

Forward hooks run on every stage, on received values and on computed values.
"""

from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.utils.hooks import BackwardHook

from meshwise.pipeline.cut.partition import CutError


class PieceBackwardHooks:
    """Backward hooks of a piece in a stage, called here because torch would not call them."""

    def __init__(self, module: nn.Module, *, computes: bool) -> None:
        """Take the hooks off a module. `computes`: this stage computes the module, so it calls the hooks."""
        self._module = module
        self._before = list(module._backward_pre_hooks.values())
        module._backward_pre_hooks.clear()
        self._after: list[Callable[..., Any]] = []
        if module._is_full_backward_hook or not computes:  # old-style hooks are on the graph node of the output
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
    """Return whether the module has hooks that see gradients."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def refuse_hooks(model: nn.Module, *, pieces: Collection[str]) -> None:
    """Raise CutError if a module that contains one of `pieces` has backward hooks; the model itself may have them."""
    paths = (piece.split(".") for piece in pieces)
    shared = {".".join(path[:end]) for path in paths for end in range(1, len(path))}.difference(pieces)
    for name in sorted(shared):
        if has_backward_hooks(model.get_submodule(name)):
            raise CutError(
                f"{name} has backward hooks, but several stages may run a part of it, and no stage sees all gradients. "
                f"Put them on modules inside it, as {next(p for p in pieces if p.startswith(f'{name}.'))}"
            )
