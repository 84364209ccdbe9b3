"""Compile the forward of each block with torch.compile; hooks, gathers and collectives stay outside of it.

torch.compile of a whole split model meets hooks, modes and collectives that it cannot trace. A block's own forward has
none of them but for the products of split matrices (`tensor/core/compiled_matmul.py`). A block that draws random
numbers runs uncompiled. The numbers depend on the place of the draw in the model, and torch.compile would take this
place for a constant. docs/architecture.md has the other rules ("Compiled blocks")."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from meshwise.comm.api.streams import gpu_properties
from meshwise.model.random_draws import RandomDraws
from meshwise.model.torch_private import compiler_backend, dispatch_mode_count, without_function_modes

_MANY = 4
"""Number of compilations of one forward (for other shapes, modes or gradients) at which a warning is given."""


def compiles_on(device: torch.device) -> bool:
    """Return True for a GPU for which torch.compile has Triton: there `compile=auto` means `blocks`."""
    return device.type == "cuda" and find_spec("triton") is not None and gpu_properties(device).major >= 7


class CompiledBlocks:
    """Compiler of the blocks of one rank, with counts of `graphs`, `graph_breaks` and `recompilations` so far.

    `blocks`: number of all blocks; `drawing`: names of the blocks that run uncompiled, because they draw."""

    def __init__(self, *, backend: str | None, splits: bool = False) -> None:
        """`backend` of torch.compile; None: nothing is compiled, and `wrap` is not called. `splits`: ranks split
        layers. Some of these are graph breaks, and all ranks must compile the same kernels. Raises ValueError for an
        unknown backend."""
        self.blocks = self.graphs = self.graph_breaks = self.recompilations = 0
        self.drawing: list[str] = []
        self._splits = splits
        self._compiled = Counter[Any]()
        known = [] if backend is None else torch.compiler.list_backends(exclude_tags=())
        if backend is not None and backend not in known:
            raise ValueError(f"compiler={backend!r} is no backend of torch.compile; there are {', '.join(known)}")
        self._backend = None if backend is None else _counting(backend, same_kernels=splits)

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks, {self.graphs} graphs compiled, {self.graph_breaks} graph breaks, "
            f"{self.recompilations} recompilations, {len(self.drawing)} blocks not compiled because they draw"
        )

    def wrap(self, module: nn.Module, *, name: str, draws: RandomDraws) -> Callable[..., Any]:
        """Return a forward for `module` that runs compiled code, or the module's own forward if the module may draw.

        `name`: the module's name in the model. `draws`: knows which modules may draw."""
        backend, own = self._backend, type(module).forward
        assert backend is not None
        compiled = torch.compile(own, backend=backend)
        self.blocks += 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            if draws.everywhere or dispatch_mode_count() or self._draws(name, draws):
                return own(module, *args, **kwargs)
            before = backend.graphs
            with without_function_modes():
                result = compiled(module, *args, **kwargs)
            if backend.graphs > before:
                self._count(own, name, backend.graphs - before)
            return result

        return forward

    def _draws(self, name: str, draws: RandomDraws) -> bool:
        if not draws.may_draw(name):
            return False
        if not self.drawing:
            warnings.warn(
                f"{name} draws random numbers, so compile=blocks runs it uncompiled; random=local compiles it",
                stacklevel=2,
            )
        if name not in self.drawing:
            self.drawing.append(name)
        return True

    def _count(self, own: Any, name: str, made: int) -> None:
        """Count the graphs that one call of a block has made."""
        self.graphs += made
        self.graph_breaks += made - 1
        self.recompilations += own in self._compiled
        self._compiled[own] += 1
        if self._compiled[own] == _MANY:
            warnings.warn(
                f"torch.compile has compiled the forward of the class of {name} {_MANY} times, and stops after 8; "
                "TORCH_LOGS=recompiles shows why. A cache of transformers differs in each layer: set use_cache=False",
                stacklevel=2,
            )
        if made > 1 and not self._splits:
            warnings.warn(
                f"torch.compile cut the forward of {name} into {made} graphs; TORCH_LOGS=graph_breaks shows where",
                stacklevel=2,
            )


class _CountingBackend(threading.local):
    """Backend of torch.compile that counts the graphs that it compiles for each thread.

    same_kernels: each process chooses the same kernels of Inductor. Otherwise each times several forms of a sum and
    takes the fastest. Sums of other forms have other last bits, so parameters that tp replicates would drift apart."""

    graphs = 0

    def __init__(self, name: str, *, same_kernels: bool) -> None:
        self._compile = compiler_backend(name)
        if same_kernels and name == "inductor":
            self._compile = partial(self._compile, config_patches={"deterministic": True})

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        compiled: Callable[..., Any] = self._compile(graph, inputs)
        return compiled


# torch shares compiled code between calls of equal backends, and keeps at most 8 versions of a function.
_counting = lru_cache(_CountingBackend)
