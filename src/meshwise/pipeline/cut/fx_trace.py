"""A model as the operations that torch.fx traces, for models that are no row of pieces, or of too few.

A trace can be cut between any two operations, and everything that is used later crosses: the stages between carry a
skip connection of a U-Net along. A trace cannot branch on data, and it fixes the values of flags such as
`self.training` where the forward itself reads them (modules keep their own).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import io
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.memory.malloc_settings import kept
from meshwise.model.deferred_init import build_without_values
from meshwise.model.forward import StageForwardLeft
from meshwise.model.module_copy import copied
from meshwise.model.random_draws import DRAWING
from meshwise.pipeline.cut.dataflow import Dependencies
from meshwise.pipeline.cut.meta_values import as_zeros, device_of, is_bare, on_meta
from meshwise.pipeline.cut.module_hooks import refuse_untraced
from meshwise.pipeline.cut.partition import CutError
from meshwise.pipeline.cut.probe import ROUNDS, Call
from meshwise.pipeline.cut.probe_result import ProbedStep, ProbeResult, typical
from meshwise.pipeline.cut.profile_module import LossTail, cut_off, profile_module, size

OUTSIDE = ("placeholder", "get_attr", "output")
"""Operations that are no steps: inputs, which every stage has, and parameters, which go with what uses them."""


@dataclass(frozen=True)
class FxTrace:
    """The operations of a model's forward. Pickles: one rank traces, for all of them.

    That is more than thrift: while fx traces it stands in for the calls of every module of the process.
    """

    graph: fx.Graph

    constants: Mapping[str, Tensor]
    """Tensors that the forward makes of nothing, such as `torch.arange(4)`, under the names that the graph has."""

    def tensor(self, name: str, *, model: nn.Module) -> Any:
        """Return the constant, module, parameter or buffer with this name in the graph."""
        if name in self.constants:
            return self.constants[name]
        path, _, last = name.rpartition(".")
        return getattr(model.get_submodule(path), last)

    def __reduce__(self) -> tuple[Any, ...]:
        named: Callable[[Any], Any] = lambda one: _Name(one.name) if isinstance(one, fx.Node) else one  # noqa: E731
        rows: list[Any] = [
            (node.op, node.name, node.target, map_aggregate((node.args, node.kwargs), named))
            for node in self.graph.nodes
        ]
        data = io.BytesIO()
        _Pickler(data).dump((rows, self.constants))
        return _unpickled, (data.getvalue(),)

    def knows(self, name: str) -> bool:
        """Return whether it calls a module of this name, or reads such a parameter."""
        return any(node.target == name for node in self.graph.nodes if node.op in ("call_module", "get_attr"))

    def reads(self, name: str) -> bool:
        """Return whether it reads this buffer, or calls a module that holds it."""
        used = {str(node.target) for node in self.graph.nodes if node.op in ("call_module", "get_attr")}
        return name in used or any(name.startswith(f"{path}.") for path in used)


@dataclass(frozen=True)
class _Name:
    """In a pickle, an operation whose result is used: they hang together in chains that are too long to follow."""

    name: str


class _Pickler(pickle.Pickler):
    """Functions by the name they are found under: some of torch, as max_pool2d, were defined inside of another one."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild such a function; everything else is pickled as usual."""
        if isinstance(obj, FunctionType) and obj.__qualname__ != obj.__name__:
            name = (obj.__module__, obj.__name__)
            if getattr(sys.modules.get(name[0]), name[1], None) is obj:
                return _named_function, name
        return NotImplemented


def _named_function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _unpickled(data: bytes) -> FxTrace:
    rows, constants = pickle.loads(data)
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    node_of: Callable[[Any], Any] = lambda one: made[one.name] if isinstance(one, _Name) else one  # noqa: E731
    for op, name, target, inputs in rows:
        args, kwargs = map_aggregate(inputs, node_of)
        made[name] = graph.create_node(op, target, args, kwargs, name=name)
        assert made[name].name == name
    return FxTrace(graph, constants)


class _Tracer(fx.Tracer):
    """Buffers too are read when the stage runs, not when it is traced."""

    proxy_buffer_attributes = True

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Trace a call as torch does, except for hooks that only a module call runs."""
        name = self.path_of_module(m)
        if not self.is_leaf_module(m, name):
            refuse_untraced(m, name=name)
        return super().call_module(m, forward, args, kwargs)


def trace_model(model: nn.Module, *, call: Call) -> FxTrace:
    """Return the operations of the model's forward, for the arguments that `call(model)` gives it.

    Raises CutError for a model that cannot be traced.
    """
    refuse_untraced(model, name="")
    given = _named(model, *_arguments(model, call))
    fixed = {name: value for name, value in given.items() if not any(True for _ in tensors(value))}
    tracer = _Tracer()
    model = copied(model, tensors={tensor: tensor for tensor in (*model.parameters(), *model.buffers())})
    try:
        graph = tracer.trace(model, concrete_args=fixed)
    except CutError:
        raise
    except Exception as error:
        raise CutError(f"torch.fx cannot trace {type(model).__name__}: {error}") from error
    names = set(inspect.signature(type(model).forward).parameters)
    for node in graph.nodes:
        if node.op == "placeholder" and node.target not in names:
            node.target = node.target.rpartition("_")[0]  # a fixed argument, which fx gave a number
    return FxTrace(graph, {name: tensor for tensor, name in tracer.tensor_attrs.items() if isinstance(tensor, Tensor)})


def _arguments(model: nn.Module, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that `call` passes to the model."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    stand_in = copied(model, tensors={tensor: tensor for tensor in (*model.parameters(), *model.buffers())})

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        raise StageForwardLeft

    stand_in.forward = forward
    try:
        call(stand_in)
    except StageForwardLeft:
        return seen[0]
    raise CutError(f"the example does not call the model, a {type(model).__name__}")


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the model's forward by name, those that are not given too."""
    given = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
    given.apply_defaults()
    return dict(list(given.arguments.items())[1:])


def probe_trace(model: nn.Module, *, trace: FxTrace, call: Call, timed: bool = False) -> ProbeResult:
    """Run a model's trace once, or more often to take times, as `call(model)` calls the model. See `probe`."""
    buffers = {buffer: build_without_values(buffer) for buffer in model.buffers()} if is_bare(model) else {}
    clocked = timed and not is_bare(model)

    def run() -> ProbeResult:
        watched = copied(model, tensors={parameter: parameter for parameter in model.parameters()} | buffers)
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        watch = _Watch(watched, trace, names=first, timed=timed)
        watched.forward = watch.forward
        with torch.random.fork_rng(), torch.enable_grad():
            result = call(watched)
        tail = watch.since.to(result) if clocked else 0.0
        return dataclasses.replace(watch.seen(), tail=tail)

    if not clocked:
        return typical([run()], model=model)
    with kept():
        return typical([run() for _ in range(ROUNDS)], model=model)


def steps_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the operations that are cut, in order."""
    return [node for node in graph.nodes if node.op not in OUTSIDE]


class _Watch(fx.Interpreter):
    """Runs a graph operation by operation, each on its own, and notes what it took."""

    def __init__(self, model: nn.Module, trace: FxTrace, *, names: Mapping[int, str], timed: bool) -> None:
        super().__init__(model, graph=trace.graph)
        self._model, self._trace, self._names, self._timed = model, trace, names, timed
        self._bare = is_bare(model)
        self._own = set(steps_of(trace.graph))
        self._steps: list[ProbedStep] = []
        self._called: set[str] = set()
        self._buffers = {id(buffer): buffer for buffer in model.buffers()}
        self._metas: dict[int, Tensor] = {}
        self._read: dict[int, set[str]] = defaultdict(set)
        self._written: dict[int, set[str]] = defaultdict(set)
        self.since = LossTail(())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's forward, with its arguments as they come."""
        given = _named(self._model, args, kwargs)
        inputs = [given[str(node.target)] for node in self.graph.nodes if node.op == "placeholder"]
        if self._bare:
            with torch.device("meta"):  # where operations that make tensors of nothing make them
                output = self.run(*on_meta(inputs))
            return as_zeros(output, device=device_of(inputs))
        output = map_tensors(_cut_off, self.run(*inputs))
        self.since = LossTail(output)
        return output

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation, and note it when it is a step."""
        if n.op == "get_attr":
            value = self._trace.tensor(str(n.target), model=self._model)
            return self._metas.setdefault(id(value), on_meta(value)) if self._bare else value
        if n not in self._own:
            return super().run_node(n)
        used = self._parameters(n)
        self._refuse_draws(n)
        versions = self._versions()
        inputs = cut_off(self.fetch_args_kwargs_from_env(n))
        run: Callable[..., Any] = lambda *args, **kwargs: getattr(self, n.op)(n.target, args, kwargs)  # noqa: E731
        output, took = profile_module(run, inputs=inputs, parameters=used, timed=self._timed)
        names = tuple(dict.fromkeys(self._names[id(parameter)] for parameter in used))
        module = str(n.target) if n.op == "call_module" else ""
        needs = self._needs(n) | self._effects(n, before=versions)
        self._steps.append(ProbedStep(n.name, module, names, needs, size(output), took))
        return output

    def _refuse_draws(self, n: fx.Node) -> None:
        """Raise CutError for a repeated call of a module that draws: a trace lacks the surrounding calls that tell its
        draws apart.
        """
        module = str(n.target)
        if n.op != "call_module":
            return
        if module in self._called and any(map(_draws, self._model.get_submodule(module).modules())):
            raise CutError(
                f"{n.target} draws random numbers and is called more than once, and a trace cannot tell which call "
                "draws what; take one module for each call"
            )
        self._called.add(module)

    def _effects(self, n: fx.Node, *, before: Mapping[int, tuple[int, int]]) -> Dependencies:
        """Return the operations that must be on the stage of this one: those that change a buffer that it reads, and
        those that read a buffer that it changes (in the next step).
        """
        if n.op == "call_module":
            read = {id(buffer) for buffer in self._model.get_submodule(str(n.target)).buffers()}
        else:
            sources = [str(source.target) for source in n.all_input_nodes if source.op == "get_attr"]
            read = {id(self._trace.tensor(name, model=self._model)) for name in sources} & self._buffers.keys()
        after = self._versions()
        written = {key for key in after if after[key] != before[key]}
        found = {step for key in read for step in self._written[key]} | {
            step for key in written for step in self._read[key] | self._written[key]
        }
        for key in read:
            self._read[key].add(n.name)
        for key in written:
            self._written[key].add(n.name)
        return Dependencies(effects=frozenset(found))

    def _versions(self) -> dict[int, tuple[int, int]]:
        """Return how often each buffer was written to, and the version of its stand-in."""
        return {
            key: (buffer._version, self._metas[key]._version if key in self._metas else 0)
            for key, buffer in self._buffers.items()
        }

    def seen(self) -> ProbeResult:
        """Return the result of the run."""
        result = next(node for node in self.graph.nodes if node.op == "output")
        return ProbeResult(tuple(self._steps), self._needs(result), (), frozenset())

    def _needs(self, node: fx.Node) -> Dependencies:
        return Dependencies(frozenset(source.name for source in node.all_input_nodes if source in self._own))

    def _parameters(self, node: fx.Node) -> list[Tensor]:
        """Return the parameters of a module, or those given to an operation."""
        if node.op == "call_module":
            return list(self._model.get_submodule(str(node.target)).parameters())
        read = [self.env[source] for source in node.all_input_nodes if source.op == "get_attr"]
        return [value for value in read if id(value) in self._names]


def _draws(module: nn.Module) -> bool:
    return isinstance(module, DRAWING) and 0.0 not in (getattr(module, "p", None), getattr(module, "dropout", None))


def _cut_off(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def part_of(graph: fx.Graph, *, keys: Sequence[str], sends: Sequence[str], last: bool) -> fx.Graph:
    """Return the operations `keys` of a graph; what they need of others is received, and `sends` leaves."""
    part = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    own = set(keys)

    def value(node: fx.Node) -> fx.Node:
        if node not in made:
            made[node] = part.node_copy(node) if node.op == "get_attr" else part.call_module("_received", (node.name,))
        return made[node]

    for node in graph.nodes:
        if node.op == "placeholder" or node.name in own or (node.op == "output" and last):
            made[node] = part.node_copy(node, value)
    if not last:
        nodes = {node.name: node for node in graph.nodes}
        part.output(part.call_module("_leaves", ({key: value(nodes[key]) for key in sends},)))
    part.lint()
    return part
