"""Compile the forward of each block with torch.compile; hooks, gathers and collectives stay outside of it.

torch.compile of a whole split model meets hooks, modes and collectives that it cannot trace. A block's own forward has
none of them. Blocks of one class and equal shapes share their compiled code. A block that draws random numbers runs as
it is, because its draws depend on places that torch.compile would take for constants.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from meshwise.model.random_draws import RandomDraws
from meshwise.model.torch_private import compiler_backend, dispatch_modes, without_function_modes


@dataclass
class CompileCounts:
    """Counts of compiled code so far on this rank. `drawing`: blocks that run as they are because they draw."""

    blocks: int = 0
    graphs: int = 0
    graph_breaks: int = 0
    recompilations: int = 0
    drawing: int = 0

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks, {self.graphs} graphs compiled, {self.graph_breaks} graph breaks, "
            f"{self.recompilations} recompilations, {self.drawing} blocks not compiled because they draw"
        )


class _CountingBackend(threading.local):
    """Backend of torch.compile that counts the graphs that it compiles for each thread."""

    graphs = 0

    def __init__(self, name: str) -> None:
        self._compile = compiler_backend(name)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        compiled: Callable[..., Any] = self._compile(graph, inputs)
        return compiled


# torch shares compiled code between calls of equal backends, and keeps at most 8 versions of a function.
_counting = lru_cache(_CountingBackend)


class CompiledBlocks:
    """The compiled blocks of one rank. `counts` say how many graphs, breaks and recompilations there were."""

    def __init__(self, *, backend: str | None) -> None:
        """`backend` of torch.compile; None: nothing is compiled. Raises ValueError if torch has no such backend."""
        self.counts = CompileCounts()
        self._seen: set[Any] = set()
        if backend is None:
            return
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"compiler={backend!r} is no backend of torch.compile; there are {', '.join(known)}")
        self._backend = _counting(backend)

    def wrap(self, module: nn.Module, *, name: str, draws: RandomDraws) -> Callable[..., Any]:
        """Return the compiled forward of the class of `module`, bound to the module; `name`: its name in the model."""
        own = type(module).forward
        self.counts.blocks += 1
        compiled, drawing = torch.compile(own, backend=self._backend), False

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal drawing
            if draws.everywhere or dispatch_modes():
                return own(module, *args, **kwargs)
            if draws.within(name):
                if not drawing:
                    drawing = True
                    self._drawing(name)
                return own(module, *args, **kwargs)
            before = self._backend.graphs
            with without_function_modes():
                result = compiled(module, *args, **kwargs)
            self._note(own, name, self._backend.graphs - before)
            return result

        return forward

    def _note(self, own: Any, name: str, made: int) -> None:
        """Count the graphs that one call of a block has made."""
        if not made:
            return
        self.counts.graphs += made
        self.counts.graph_breaks += made - 1
        self.counts.recompilations += own in self._seen
        self._seen.add(own)
        if made > 1:
            warnings.warn(
                f"torch.compile cut the forward of {name} into {made} graphs; TORCH_LOGS=graph_breaks shows where",
                stacklevel=2,
            )

    def _drawing(self, name: str) -> None:
        self.counts.drawing += 1
        if self.counts.drawing == 1:
            warnings.warn(
                f"{name} draws random numbers, so compile=blocks runs it uncompiled; without dropout it is compiled",
                stacklevel=2,
            )
