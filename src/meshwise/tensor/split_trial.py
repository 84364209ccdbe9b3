"""Try the split of an attention or MLP on random numbers in one process, to find out if it computes the same.

Between its matrices a forward may mix heads or features, use its input, or cut a fused matrix in any order. So a copy
of the module runs whole, and again for a rank, as `tensor_parallel` splits it. Its matrices do not multiply. They
return random numbers, and on a rank the rank's part of the same numbers. The inputs of rowwise matrices and the output
must then equal the rank's part of the whole module's:

    x ── random numbers for colwise ── code of the module ── compared at rowwise ── random numbers ── output, compared

Autograd finds the parameters on which the compared tensors depend. A rank uses those before `rowwise` for its own
heads, so their gradients must be summed. It uses others like every rank, and they must not be summed."""

import contextlib
import inspect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.comm.in_process.thread_and_trace_worlds import TraceWorld
from meshwise.layout.layout import ANYWHERE, DimSplit, Layout
from meshwise.model.module_copy import copy_modules
from meshwise.model.parameter_table import Placement
from meshwise.plan import Plan
from meshwise.tensor.core.module_role import Part
from meshwise.tensor.core.split_context import SplitContext
from meshwise.tensor.detect.attention_names import enclosing
from meshwise.tensor.detect.layer_formulas import as_norm, matrices
from meshwise.tensor.tensor_parallel import tensor_parallel
from meshwise.tensor.tp_schemes import KV_REPLICA, Axes, mesh_with_kv_replicas, scheme_on

_NEAR = 1e-4
"""Largest difference, relative to the largest value: a module may compute in float32. A wrong split differs more."""
_MOST = 2**22
"""Most numbers in a parameter of a module that is tried, besides its matrices."""
_TRIED = "block.tried"
_Arguments: TypeAlias = tuple[Tensor, Sequence[Any], Mapping[str, Any]]
_Call: TypeAlias = tuple[str, int]
"""Name of a matrix, and number of the call."""


class SplitTrials:
    """Trials under one plan. Of equal modules with equal parts, one is tried."""

    def __init__(self, plan: Plan) -> None:
        kept = {key: getattr(plan, key) for key in ("tp_mode", "tp_depth", "sequence_parallel")}
        self._plan = Plan(tp=max(plan.tp, 2), **kept)
        self._known: dict[str, str | None] = {}

    def error(self, module: nn.Module, *, name: str, parts: Mapping[str, Part]) -> str | None:
        """Return "" if a module called `name` computes the same under `parts`, else the reason why it does not.

        None: the module cannot be tried. It may need other arguments, or draw random numbers."""
        own = {
            _TRIED + ("." if key and not name else "") + key.removeprefix(name): part
            for key, part in parts.items()
            if name in (key, *enclosing(key)) and (key, part.role) != (name, "block")
        }
        if any(part.sharded_class or part.role in ("block", "experts") for part in own.values()):
            return None  # torch's attention gets another forward; blocks are tried one by one
        settings = [value for value in vars(module).values() if isinstance(value, bool | str | float)]
        kind = repr((module, settings, own))
        if kind not in self._known:
            self._known[kind] = None
            with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("cpu"):
                self._known[kind] = _Trial(module, own, self._plan).error()
        return self._known[kind]


class _Run(NamedTuple):
    """Tensors of one run: inputs of the matrices, the first output, and the input (as "") and parameters by name."""

    given: dict[_Call, Tensor]
    output: Tensor
    sources: Mapping[str, Tensor]

    def behind(self, results: Iterable[Tensor]) -> set[str]:
        """Return the names of the sources on which `results` depend."""
        live = [one for one in results if one.requires_grad]
        ones, sources = [torch.ones_like(one) for one in live], [*self.sources.values()]
        found = torch.autograd.grad(live, sources, ones, retain_graph=True, allow_unused=True) if live else ()
        return {name for name, gradient in zip(self.sources, found, strict=False) if gradient is not None}


class _Trial:
    """Trial of one module. In `parts`, `_Run` and the copies of the module its name is `block.tried`."""

    def __init__(self, module: nn.Module, parts: Mapping[str, Part], plan: Plan) -> None:
        self._module, self._parts = module, parts
        self._plan, self._mesh = plan, mesh_with_kv_replicas(plan, parts=parts.values())
        self._scheme = scheme_on(self._mesh, plan=plan, blocks=True)
        self._matrices = {one.name: one for one in matrices(module, name=_TRIED)}
        self._roles = {name: parts[name].role if name in parts else "" for name in self._matrices}
        self._width = next(one.inputs for name, one in self._matrices.items() if self._roles[name] == "colwise")
        norms = {name: as_norm(inner) for name, inner in module.named_modules(prefix=_TRIED)}
        within = [name for name, part in parts.items() if part.role == "norm" and part.inner]
        self._norms = [name for name, norm in norms.items() if norm and (norm[0] == self._width or name in within)]
        self._generator = torch.Generator("cpu").manual_seed(1)
        self._numbers = self._random_numbers()
        self._rows = 2 * math.prod(map(self._mesh.degree, self._scheme.rows))
        self._answers: dict[_Call, Tensor] = {}
        self._placed: Mapping[str, Placement] = {}

    def error(self) -> str | None:
        """Return the reason why the module computes something else on a rank, "", or None for random outputs."""
        arguments, whole = self._first_run()
        again = self._run(arguments, rank=None)
        if any(_apart(one, again.given[key]) or not one.isfinite().all() for key, one in whole.given.items()):
            return None
        places = {tuple(self._mesh.index(r, axis=a) for a in self._scheme.inner): r for r in range(self._mesh.size)}
        for rank in dict.fromkeys([*places.values()][1:2] + [*places.values()][-1:]):
            try:
                part = self._run(arguments, rank=rank)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                return f"on a rank's part it fails with {type(error).__name__}: {error}"
            if reason := self._misplaced(whole) or self._different(whole, part, rank):
                return reason
        return ""

    def _first_run(self) -> tuple[_Arguments, _Run]:
        """Return arguments with which the module runs, and its run. Raises ValueError if it runs with none."""
        least = math.prod(map(self._mesh.degree, self._scheme.tokens))
        tables = sorted({size for x in self._module.buffers() for size in x.shape if size < 1024 and size % least == 0})
        for tokens in dict.fromkeys((max(6, least), *tables, max(2, least))):  # tables may be short, or fix the tokens
            if found := self._run_of_tokens(tokens):
                return found
        raise ValueError("no arguments fit")

    def _run_of_tokens(self, tokens: int) -> tuple[_Arguments, _Run] | None:
        """Return arguments of so many tokens with which the module runs, and its run; None if it runs with none."""
        rows = self._rows
        closing = [one.inputs for name, one in self._matrices.items() if self._roles[name] == "rowwise"]
        heads = max(1, *(part.heads for part in self._parts.values()))
        angles = self._random(tokens, min(closing or [self._width]) // heads)
        rotations = torch.polar(torch.ones_like(angles), angles)[:, : angles.size(1) // 2]
        turned = [angles[None, :, : angles.size(1) // part] for part in (1, 2, 4)] + [angles]
        pairs = [(wave.cos(), wave.sin()) for wave in turned]
        taken = [*inspect.signature(self._module.forward).parameters.values()][1:]
        packed = any(one.name == "cu_seqlens" for one in taken)  # images side by side, without rows
        special: dict[str, list[Any]] = {
            "position_embeddings": pairs[::-1] if packed else pairs,
            "position_ids": [torch.arange(tokens)[None]],
            "attention_mask": [None, torch.ones(rows, 1, tokens, tokens)],
            "cu_seqlens": [torch.tensor([0, tokens], dtype=torch.int32)],
            "alibi": [self._random(rows * heads, 1, tokens)],
        }
        states = [self._random(rows, tokens + more, self._width) for more in (0, 1)]
        usual = [None, torch.ones(1, tokens, dtype=torch.bool), *states, angles, rotations, *pairs]
        required = [one for one in taken if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        fillers = [special.get(one.name, usual) for one in required]
        alike = [tuple(each[min(place, len(each) - 1)] for each in fillers) for place in range(len(usual))]
        named = {one.name: special[one.name] for one in taken if one.name in special and one not in required}
        choices = [{}, *(dict(zip(named, each, strict=True)) for each in itertools.product(*named.values()))]
        for shape in [(tokens,)] if packed else [(rows, tokens), (rows, 4, 4)]:
            x = self._random(*shape, self._width)
            for more in itertools.chain(alike, itertools.islice(itertools.product(*fillers), 64)):
                for by_name in choices:
                    self._answers.clear()
                    with contextlib.suppress(Exception):
                        return (x, more, by_name), self._run((x, more, by_name), rank=None)
        return None

    def _run(self, arguments: _Arguments, *, rank: int | None) -> _Run:
        """Run a copy of the module: whole, or split as on `rank`. Whole, its input and parameters need gradients."""
        root, given = nn.Module(), dict[_Call, Tensor]()
        root.block = nn.Module()
        root.block.tried = tried = copy_modules(self._module, tensors=self._numbers).eval()
        for inner in tried.modules():
            inner._forward_hooks.clear()
            inner._forward_pre_hooks.clear()
        x, more, by_name = arguments if rank is None else self._split(root, arguments, rank)
        for name, inner in tried.named_modules(prefix=_TRIED):
            if name in self._matrices:
                vars(inner)["forward"] = self._answer(name, rank, given)
            elif name in self._norms:
                vars(inner)["forward"] = lambda y: y  # its formula and its split are known
        x = x.clone().requires_grad_(rank is None)
        with torch.set_grad_enabled(rank is None):
            output = next(tensors(tried(x, *more, **by_name)))
        return _Run(given, output, {"": x, **dict(root.named_parameters())})

    def _split(self, root: nn.Module, arguments: _Arguments, rank: int) -> _Arguments:
        """Split a copy of the module as on `rank`, and return the rank's part of the arguments."""
        world, scheme = TraceWorld(rank=rank, mesh=self._mesh, device="cpu"), self._scheme
        context = SplitContext(world, scheme_on(self._mesh, plan=self._plan, blocks=False))
        parts = {"block": Part("block", hidden_width=self._width), **self._parts}
        names = [(name, enclosing(name)) for name, _ in root.named_parameters()]
        placed = [key for key, part in parts.items() if part.role not in ("block", "attention", "pair")]
        self._open = {name for name, around in names if not {name, *around}.intersection(placed)}
        parts |= dict.fromkeys(self._open, Part("whole"))
        self._placed = tensor_parallel(root, plan=self._plan, parts=parts, outside=context)
        for name, parameter in list(root.named_parameters()):
            owner, _, key = name.rpartition(".")
            layout = self._placed[name].layout
            if owner in self._matrices:  # a zero that takes no memory
                own = parameter.new_zeros(()).expand(layout.local_shape(parameter.shape, mesh=self._mesh, rank=rank))
            else:
                own = self._part(parameter, layout, rank)
            root.get_submodule(owner)._parameters[key] = nn.Parameter(own)

        def take(value: Tensor) -> Tensor:
            """Return the part of an argument that has rows, or rows and heads in one dim, or is shaped as the input."""
            if value.dim() < 2:
                return value
            rows = value.size(0) == x.size(0) or (value.dim() == 3 and value.size(0) % x.size(0) == 0)
            tokens = scheme.tokens if value.shape == x.shape else ()
            features = scheme.hidden if value.size(-1) == self._width else ()
            return self._cut(value, rank, scheme.rows if rows else (), tokens, features)

        x, more, by_name = arguments
        if scheme.tokens:
            tokens = Layout((scheme.tokens,))
            sizes = [tokens.local_shape((x.size(-2),), mesh=self._mesh, rank=r)[0] for r in range(self._mesh.size)]
            context.shard_sizes.tokens = tuple(sizes)
        own, part = take(x), self._parts.get(_TRIED)
        if scheme.inner_rows != scheme.rows and part is not None and not part.even_rows:
            own = own[1:]  # the other ranks, whose rows the matrices return, have more
        return own, map_tensors(take, more), map_tensors(take, by_name)

    def _answer(self, name: str, rank: int | None, given: dict[_Call, Tensor]) -> Any:
        """Return a forward for a matrix that notes its input, and returns random numbers."""
        role, part = self._roles[name], self._parts.get(name, Part("whole"))

        def forward(x: Tensor, *_: Any) -> Tensor:
            call = name, sum(key[0] == name for key in given)
            given[call] = x
            if rank is None:
                y = self._random(*x.shape[:-1], self._matrices[name].outputs)
                return self._answers.setdefault(call, y).clone()
            scheme, whole = self._scheme, self._answers[call]
            if role == "colwise":
                return self._inner(whole, part.cut, rank, shared=part.shared)
            hidden = scheme.hidden if role or whole.size(-1) == self._width else ()
            return self._cut(whole, rank, scheme.rows, scheme.tokens, hidden)

        return forward

    def _inner(self, y: Tensor, cut: DimSplit, rank: int, *, shared: bool = False) -> Tensor:
        """Return the heads or features that a rank has of `y`. `shared`: several ranks have the same keys."""
        axes = tuple(axis for axis in self._scheme.inner if not (shared and axis == KV_REPLICA))
        return self._cut(y, rank, self._scheme.inner_rows, (), axes, cut)

    def _cut(self, y: Tensor, rank: int, rows: Axes, tokens: Axes, features: Axes, cut: DimSplit = ANYWHERE) -> Tensor:
        if y.dim() == 2 and tokens:  # rows and tokens in one dim
            return self._cut(y.unflatten(0, (self._rows, -1)), rank, rows, tokens, features, cut).flatten(0, 1)
        splits = [rows, *[()] * (y.dim() - 2), features]
        splits[-2] = tokens or splits[-2]
        return self._part(y, Layout(tuple(splits), cuts=(*[ANYWHERE] * (y.dim() - 1), cut)), rank)

    def _part(self, y: Tensor, layout: Layout, rank: int) -> Tensor:
        pieces = [y[piece.slices] for piece in layout.pieces(y.shape, mesh=self._mesh, rank=rank)]
        return torch.cat(pieces, layout.section_dim) if y.dim() else y

    def _different(self, whole: _Run, part: _Run, rank: int) -> str:
        """Return a text if the inputs of rowwise matrices, or the outputs, differ from the whole module's."""
        closing = {key: x for key, x in whole.given.items() if self._roles[key[0]] == "rowwise"}
        for key, x in closing.items():
            if _apart(self._inner(x, self._parts[key[0]].cut, rank), part.given[key]):
                return "it mixes heads or features between its matrices, takes them in another order, or reads sizes"
        output, own, scheme = whole.output, self._parts.get(_TRIED, Part("attention")), self._scheme
        if closing and output.size(-1) == self._width and output.dim() > 1:
            output = self._cut(output, rank, scheme.rows, scheme.tokens, scheme.hidden)
        elif not closing:
            heads = own.heads or output.size(-1)
            output = self._inner(output, DimSplit(grain=own.grain * (output.size(-1) // heads)), rank)
        return "its output depends on other heads or features" if _apart(output, part.output) else ""

    def _misplaced(self, whole: _Run) -> str:
        """Return a text if a gradient of the input or a parameter would be summed wrongly over the ranks, or ""."""
        homes = {enclosing(name)[0] for name, role in self._roles.items() if role == "colwise"} - {_TRIED}
        own = [(name, x) for (name, _), x in whole.given.items() if homes.isdisjoint(enclosing(name))]
        gathered = [x for name, x in own if name in self._parts and self._parts[name].gathered]
        closing, first = ([x for name, x in own if self._roles[name] == role] for role in ("rowwise", "colwise"))
        inside = whole.behind(closing or [whole.output])
        outside = whole.behind([*first, whole.output] if closing else first)
        # a gathered input gets the sum of its gradients: then only heads or features of one rank may use it
        if "" in ((whole.behind([whole.output]) if closing else ()) if gathered else inside):
            return "it uses its input besides calling its first matrices with it"
        if gathered and any("" in whole.behind([x]) for x in first if not any(x is one for one in gathered)):
            return "some of its first matrices gather their input, and others do not"
        for name in sorted({*inside, *outside} - {"", *self._open}):  # those without a part are refused elsewhere
            placement, shown = self._placed[name], name.removeprefix(_TRIED)[1:]
            by_head = {*self._scheme.inner} <= {*placement.layout.axes, *placement.summed}
            if (name in inside and not by_head) or name in whole.behind(gathered):
                return f"it uses {shown} for the heads or features of one rank"
            if name in outside and by_head and not (self._scheme.hidden or self._scheme.tokens):
                return f"it uses {shown} for all heads or features"
        return ""

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def _random_numbers(self) -> dict[Tensor, Tensor]:
        """Return the new parameters and buffers. Raises ValueError if they are too many."""
        found: dict[Tensor, Tensor] = {}
        for name, old in (*self._module.named_parameters(), *self._module.named_buffers()):
            learned = isinstance(old, nn.Parameter)
            if f"{_TRIED}.{name.rpartition('.')[0]}" in self._matrices:
                new = torch.zeros((), dtype=torch.float64).expand(old.shape)  # takes no memory
            elif learned or (old.is_meta and old.is_floating_point()):
                if old.numel() > _MOST:
                    raise ValueError("the module is too large")
                new = self._random(*old.shape)
            else:  # a table of positions, or a mask
                new = torch.full_like(old, old.dtype == torch.bool, device="cpu") if old.is_meta else old.cpu().clone()
            found[old] = nn.Parameter(new) if learned else new
        return found


def _apart(expected: Tensor, found: Tensor) -> bool:
    """Return whether two tensors differ in shape, or by more than rounding."""
    if expected.shape != found.shape:
        return True
    return bool((expected - found).abs().max() > _NEAR * expected.abs().max())
