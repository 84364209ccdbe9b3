"""Hooks that the user has registered on parameters.

Tensors that replace a model's parameters (of a stage, or initialized here) have no hooks, because torch stores hooks on
the tensor.
"""

from collections.abc import Callable

from torch import Tensor, nn


def carry_hooks(old: nn.Parameter, *, to: nn.Parameter) -> None:
    """Let a parameter have the hooks of the one that it replaces; those that are removed from that one go here too.

    Each has hooks of its own that call the old one's: the engine adds to them, and two stages may have one parameter.
    """

    def arriving(gradient: Tensor) -> Tensor:
        for hook in list((old._backward_hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def accumulated(parameter: Tensor) -> None:
        for hook in list((_post_hooks(old) or {}).values()):
            hook(parameter)

    if not to.requires_grad:
        return
    if old._backward_hooks:
        to.register_hook(arriving)
    if _post_hooks(old):
        to.register_post_accumulate_grad_hook(accumulated)


def hooks_on(parameter: nn.Parameter) -> bool:
    """Return whether there are any."""
    return bool(parameter._backward_hooks) or bool(_post_hooks(parameter))


def _post_hooks(parameter: nn.Parameter) -> dict[int, Callable[[Tensor], None]] | None:
    return parameter._post_accumulate_grad_hooks
