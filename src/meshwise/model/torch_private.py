"""Wrap functions of torch, most of them private: about modes, autograd's graph, schemas, backends of torch.compile."""

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # noqa: PLC0414 - other files import it
from torch.utils._python_dispatch import _disable_current_modes

from meshwise.base.tensor_tree import tensors


class LightDispatchMode(TorchDispatchMode):
    """Base of dispatch modes for hot paths: torch does not hide their handler from torch.compile by a wrapper.

    The wrapper takes ten microseconds for each operation. Compiled blocks never run inside these modes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def in_backward() -> bool:
    """Return whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def graph_nodes(roots: Iterable[Node | None], *, until: Callable[[Node], bool] = lambda _: False) -> Iterator[Node]:
    """Yield each node of autograd's graph from `roots` on, once, but none that only an `until` node leads to."""
    waiting, seen = [root for root in roots if root is not None], set[Node]()
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            yield node
            waiting += [one for one, _ in node.next_functions if one is not None and not until(node)]


def needed_gradients(ctx: Any) -> tuple[bool, ...]:
    """Return, for each argument of an autograd function, whether the running backward needs its gradient.

    `ctx`: the function's context. A part of a split backward needs fewer gradients than `ctx.needs_input_grad` says."""
    nodes = (node for node, _ in ctx.next_functions if node is not None)  # of each argument that needs a gradient
    return tuple(need and _runs(next(nodes)) for need in ctx.needs_input_grad)


def _runs(node: Node) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch does not answer for a leaf of `autograd.grad`
        return True


def written_arguments(func: Any, *, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the arguments that an operation of torch changes in place."""
    if not func._schema.is_mutable:
        return
    arguments = func._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(named.get(argument.name))


def dispatch_mode_count() -> int:
    """Return the number of active dispatch modes."""
    return int(torch._C._len_torch_dispatch_stack())


def function_mode_count() -> int:
    """Return the number of active function modes; inside the handler of a mode, of the modes that follow it."""
    return int(torch._C._len_torch_function_stack())


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Hide calls of torch functions inside the block from all function modes (`TorchFunctionMode`)."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(function_mode_count())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def compiler_backend(name: str) -> Callable[..., Any]:
    """Return the backend of torch.compile of this name."""
    # torch imports its compiler when it is first used, which takes a second.
    registry = importlib.import_module("torch._dynamo.backends.registry")
    found: Callable[..., Any] = registry.lookup_backend(name)
    return found


without_dispatch_modes: Callable[[], contextlib.AbstractContextManager[None]] = _disable_current_modes
"""Hide operations inside the block from all dispatch modes: operations that are no part of the model's step."""
