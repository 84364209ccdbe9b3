"""Split a plain model by tensor parallelism, without changes to the model's code.

A module that must compute on its shards gets a new class, whose bases are a sharded class (such as `ShardedLinear`) and
the module's own class. So `isinstance`, names, hooks and `state_dict` work as before. The user's forward runs
unchanged on local rows and features, and hooks reshard the activations between modules. Parameters keep their full
shapes here: the returned placements say what each rank stores, and the engine replaces the parameters."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from meshwise.layout.layout import ANYWHERE, DimSplit, Layout
from meshwise.model.module_copy import set_sharded_class
from meshwise.model.parameter_table import Placement
from meshwise.plan import Plan
from meshwise.tensor.core import activation_reshard as reshard
from meshwise.tensor.core.activation_reshard import GatheredOutputs
from meshwise.tensor.core.module_role import Part
from meshwise.tensor.core.sharded_layers import (
    MultiheadSharding,
    Projection,
    ShardedEmbedding,
    ShardedHead,
    ShardedLinear,
    ShardedMagnitude,
    ShardedNorm,
    SplitNorm,
    SplitTable,
)
from meshwise.tensor.core.split_context import SplitContext
from meshwise.tensor.detect.attention_heads import set_count
from meshwise.tensor.detect.attention_names import enclosing
from meshwise.tensor.detect.layer_formulas import PATCH_CONVOLUTIONS, computes_as
from meshwise.tensor.tp_schemes import scheme_on

_TO_HIDDEN = ("norm", "single", "embedding")
"""Roles of modules that return hidden states, inside and outside of blocks."""


def tensor_parallel(
    module: nn.Module, *, plan: Plan, parts: Mapping[str, Part], outside: SplitContext
) -> Mapping[str, Placement]:
    """Split a model in place, and return the placement of each parameter by its first name.

    `parts`: parts by name of a module, or of a parameter that a module holds itself. `outside`: the shared state for
    modules outside of the blocks; its world has the plan's mesh. Modules get new classes, hooks and this rank's counts
    of heads. Parameters stay full (they may be on the meta device); the caller replaces them by this rank's parts.

    Raises ValueError for an embedding with `max_norm`, `sparse` or `scale_grad_by_freq`, for a tied parameter with two
    placements, and for a module without the matrix that its part needs."""
    outside.recall.remember(outside.shard_sizes)
    inside = dataclasses.replace(outside, scheme=scheme_on(outside.world.mesh, plan=plan, blocks=True))
    split = _Split(module, parts, outside=outside, inside=inside)
    for name, part in parts.items():
        split.apply(name, part)
    split.add_hooks(whole=plan.pp == 1)
    return split.placements()


class _Split:
    """Splitter of one model: holds its contexts inside and outside of the blocks, and the placements so far."""

    def __init__(
        self, module: nn.Module, parts: Mapping[str, Part], *, outside: SplitContext, inside: SplitContext
    ) -> None:
        self._root = module
        self._parts = parts
        self._modules = dict(module.named_modules(remove_duplicate=False))
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self._played: dict[nn.Module, str] = {}
        self._first_names = {parameter: name for name, parameter in module.named_parameters()}
        self._outside = outside
        self._inside = inside
        self._blocks = [name for name, part in parts.items() if part.role == "block"]
        self._placed: dict[str, Placement] = {}
        self._kept_whole: dict[str, Placement] = {}
        self._roles: Mapping[str, Callable[[str, Part], None]] = {
            **dict.fromkeys(("colwise", "rowwise", "single", "head"), self._linear),
            "embedding": self._embedding,
            **dict.fromkeys(("positions", "patches", "vector", "inner"), self._by_features),
            "norm": self._norm,
            "magnitude": self._magnitude,
            **dict.fromkeys(("whole", "each_head"), self._whole),
            **dict.fromkeys(("attention", "pair"), self._around_pair),
            # handled by `activation_regions`, `add_hooks` and `expert_parallel`
            **dict.fromkeys(("dropout", "block", "experts"), lambda _name, _part: None),
        }

    def apply(self, name: str, part: Part) -> None:
        """Split the module or parameter `name`. If another stage holds it, only reshard the module's output."""
        if part.on_other_stage:
            if name in self._modules:
                self._gather_output(self._modules[name], part)
            return
        module = self._modules.get(name)
        if module is not None and self._played.setdefault(module, name) != name:
            return  # it was split under another name
        self._roles[part.role](name, part)

    def placements(self) -> Mapping[str, Placement]:
        """Return placements by first parameter name, except of experts.

        Raises ValueError if a tied parameter has two placements."""
        placed = {**self._kept_whole, **self._placed}
        found: dict[str, Placement] = {}
        by: dict[str, str] = {}
        for name, placement in placed.items():
            first = self._first_names[self._parameters[name]]
            if found.setdefault(first, placement) != placement:
                holder, other = (key.rpartition(".")[0] for key in (by[first], name))
                rules = f"as by the rules {{'{holder}': 'whole', '{other}': 'whole'}}"
                raise ValueError(
                    f"{by[first]} and {name} are one parameter, but their parts store it as '{found[first].layout}' "
                    f"and as '{placement.layout}'; give them parts that agree, "
                    f"{'or take tp_mode=1d' if self._outside.scheme.hidden else rules}"
                )
            by.setdefault(first, name)
        experts = tuple(f"{name}." for name, part in self._parts.items() if part.role == "experts")
        return {name: found[name] for name in self._first_names.values() if not name.startswith(experts)}

    # ---- the parts -----------------------------------------------------------------------------------------------

    def _linear(self, name: str, part: Part) -> None:
        context = self._context(name, part)
        if name in self._parameters:
            projection = Projection(context, part=part, shape=self._parameters[name].shape)
            self._placed[name] = projection.weight_placement
            return
        module = self._modules[name]
        projection = Projection(context, part=part, shape=_matrix(module, name).shape)
        set_sharded_class(module, front=ShardedHead if part.role == "head" else ShardedLinear, sharding=projection)
        self._placed[f"{name}.weight"] = projection.weight_placement
        if f"{name}.bias" in self._parameters:
            summed = (*context.scheme.replicas, *projection.product.rows)
            self._placed[f"{name}.bias"] = Placement(projection.bias_layout, summed)
        self._gather_output(module, part)

    def _embedding(self, name: str, part: Part) -> None:
        module = self._modules[name]
        _require_plain_embedding(module, name)
        rows, features = _matrix(module, name).shape
        padding = getattr(module, "padding_idx", None)
        table = SplitTable(self._outside, name=name, shape=(rows, features), padding_idx=padding)
        inside = not computes_as(module, kind=nn.Embedding)
        set_sharded_class(module, front=ShardedEmbedding, sharding=table, inside=inside)
        table.follow(self._root)
        self._placed[f"{name}.weight"] = table.head.weight_placement
        self._gather_output(module, part)

    def _gather_output(self, module: nn.Module, part: Part) -> None:
        """Register a hook that gathers the module's output if later modules need all features of it."""
        if part.whole_features and part.role in ("embedding", "single", "rowwise"):
            reshard.change_output(module, change=self._gathering())

    def _gathering(self) -> reshard.Change:
        """Return a function that gathers all features of hidden states; call this while parameters are still full."""
        return functools.partial(self._outside.gather_features_of, sizes=self._outside.hidden_sizes(self._width()))

    def _by_features(self, name: str, part: Part) -> None:
        """Place parameters that have a dim of features of the hidden states, or of a pair's inner features."""
        context = self._context(name, part)
        scheme, inner = context.scheme, part.role == "inner"
        axes, rows = (scheme.inner, scheme.inner_rows) if inner else (scheme.hidden, (*scheme.rows, *scheme.tokens))
        if part.shared:
            axes, rows = tuple(axis for axis in axes if axis not in scheme.kv_replicas), (*rows, *scheme.kv_replicas)
        module = self._modules.get(name)
        if isinstance(module, nn.Embedding):
            _require_plain_embedding(module, name)
        if isinstance(module, PATCH_CONVOLUTIONS) and part.role == "patches" and context.degree(axes) > 1:
            reshard.share_input_channels(module, context=context, axes=axes)
        elif part.role == "patches" and module is not None and context.degree(axes) > 1:
            summed = functools.partial(reshard.with_summed_gradient, context=context, axes=axes)
            reshard.change_input(module, change=summed)
        parameters = {name: self._parameters[name]} if module is None else dict(module.named_parameters(prefix=name))
        for key, parameter in parameters.items():
            dim = _dim_of_features(part, parameter)
            splits = tuple(axes if other == dim else () for other in range(parameter.dim()))
            cuts = tuple(part.cut if inner and other == dim else ANYWHERE for other in range(parameter.dim()))
            self._placed[key] = Placement(Layout(splits, cuts=cuts), (*context.scheme.replicas, *rows))

    def _norm(self, name: str, part: Part) -> None:
        context, module = self._context(name, part), self._modules[name]
        self._by_features(name, dataclasses.replace(part, role="inner" if part.inner else "vector"))
        axes = context.scheme.inner if part.inner else context.scheme.hidden
        axes = tuple(axis for axis in axes if not part.shared or axis not in context.scheme.kv_replicas)
        if context.degree(axes) == 1:
            return
        assert part.norm is not None
        parameter = next(module.parameters(recurse=False), None)
        features = vars(module)["normalized_shape"][0] if parameter is None else parameter.numel()
        sizes = context.sizes(int(features), axes=axes, cut=part.cut if part.inner else ANYWHERE)
        set_sharded_class(module, front=ShardedNorm, sharding=SplitNorm(context.world, axes, sizes, part.norm))

    def _magnitude(self, name: str, part: Part) -> None:
        """Place DoRA's factors like the outputs of their matrix, and sum the norms of its rows if they are split."""
        context = self._context(name, part)
        place, role = (self._by_features, "inner") if part.inner else (self._whole, "whole")
        place(name, dataclasses.replace(part, role=role))
        axes = () if part.inner else context.scheme.inner
        set_sharded_class(self._modules[name], front=ShardedMagnitude, sharding=(context.world, axes))

    def _whole(self, name: str, part: Part) -> None:
        """Place a module's parameters whole on every rank. For `each_head`, gradients are summed over heads too."""
        scheme = self._context(name, part).scheme
        rows = (*scheme.inner_rows, *scheme.inner) if part.role == "each_head" else (*scheme.rows, *scheme.tokens)
        module = self._modules.get(name)
        parameters = {name: self._parameters[name]} if module is None else dict(module.named_parameters(prefix=name))
        for key, parameter in parameters.items():
            self._kept_whole[key] = Placement(Layout.replicated(parameter.dim()), (*scheme.replicas, *rows))
        if part.summed_from is not None and module is not None:
            reshard.sum_gradient_of_features(module, context=self._inside, start=part.summed_from)
        if part.role == "whole" and isinstance(module, nn.Linear) and module.in_features == self._width():
            reshard.change_input(module, change=self._gathering())

    def _around_pair(self, name: str, part: Part) -> None:
        """Set the head counts of the module around a pair to this rank's counts; register hooks on its arguments."""
        context, module = self._context(name, part), self._modules[name]
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # in evaluation, nested tensors go to a kernel that reads whole weights
            return
        inner = context.scheme.inner
        for attribute, grain in part.counts:
            count = operator.attrgetter(attribute)(module)
            cut, sizes = DimSplit(grain=grain), count if isinstance(count, tuple) else (count,)
            counts = [context.own_size(size, axes=inner, cut=cut) for size in sizes]
            set_count(module, attribute=attribute, count=tuple(counts) if isinstance(count, tuple) else counts[0])
        replicas = context.scheme.kv_replicas if part.kv_replicas > 1 else ()
        keys = tuple(axis for axis in inner if axis not in replicas)
        for attributes, axes in ((part.key_counts, keys), (part.group_counts, replicas)):
            for attribute in attributes:
                size = operator.attrgetter(attribute)(module)
                set_count(module, attribute=attribute, count=context.own_size(size, axes=axes))
        if part.sharded_class is None:
            # before the arguments are cut to this rank's heads
            reshard.align_arguments(module, context=context, widths=self._read_by_first(name))
        if part.by_head and context.degree(inner) > 1:
            heads = Layout((inner,), cuts=(DimSplit(grain=part.grain),))
            reshard.slice_heads(module, context=context, names=part.by_head, heads=heads, size=part.heads)
        within, gathered = f"{name}." if name else "", [key for key, other in self._parts.items() if other.gathered]
        # an adapted matrix lies inside the child that reads the input
        readers = [
            child
            for key, child in module.named_children()
            if any(f"{other}.".startswith(f"{within}{key}.") for other in gathered)
        ]
        if readers:
            reshard.gather_input_once(module, context=context, features=self._width(name), readers=len(readers))
        if part.even_rows:
            reshard.require_even_rows(module, name=name, context=context)
        if part.narrow_grain:
            own = context.own_size(self._width(name), axes=inner, cut=DimSplit(grain=part.narrow_grain))
            reshard.narrow_input(module, readers=readers, features=own)
        if part.sharded_class is None:
            return
        own_parts = {key: self._parts.get(f"{name}.{key}") for key, _ in module.named_parameters(recurse=False)}
        projections = {
            key: Projection(context, part=own, shape=self._parameters[f"{name}.{key}"].shape)
            for key, own in own_parts.items()
            if own is not None and own.role in ("colwise", "rowwise")
        }
        set_sharded_class(module, front=part.sharded_class, sharding=MultiheadSharding(context, projections))

    def _read_by_first(self, name: str) -> set[int]:
        """Return the input sizes of the first matrices of pairs in a module: over all ranks, and on this rank."""
        widths = set()
        for key, part in self._parts.items():
            if (part.role == "colwise" or part.summed_from is not None) and (key.startswith(f"{name}.") or not name):
                shape = (self._parameters[key] if key in self._parameters else _matrix(self._modules[key], key)).shape
                features = shape[0 if part.transposed else 1]
                widths |= {features, self._inside.own_size(features, axes=self._inside.scheme.hidden)}
        return widths

    # ---- hooks of the whole model --------------------------------------------------------------------------------

    def add_hooks(self, *, whole: bool) -> None:
        """Register hooks that reshard hidden states and gather the output; `whole`: this rank runs all blocks."""
        reshard.exchange_row_counts(self._root, context=self._outside)
        self._outside.origins.follow(self._root, placed={**self._kept_whole, **self._placed})
        stacks: dict[str, list[str]] = {}
        for name in self._blocks:
            stacks.setdefault(name.rpartition(".")[0], []).append(name)
        for names in stacks.values():
            first, last = self._modules[names[0]], self._modules[names[-1]]
            if self._inside.degree(self._inside.scheme.tokens) > 1:
                reshard.change_input(first, change=self._inside.take_tokens)
                reshard.change_output(last, change=self._inside.gather_tokens)
            if self._parts[names[0]].whole_features:
                sizes = self._outside.hidden_sizes(self._width())
                reshard.change_input(first, change=functools.partial(self._outside.take_features, sizes=sizes))
                reshard.change_output(last, change=self._gathering())
        leaving = GatheredOutputs()
        leaving.follow(self._root)
        self._note_split_outputs(leaving, whole=whole)

    def _note_split_outputs(self, leaving: GatheredOutputs, *, whole: bool) -> None:
        """Register hooks that note split hidden states, and attention weights of a rank's own heads."""
        for name, part in self._parts.items():
            block = part.role == "block"
            context = self._inside if block else self._context(name, part)
            split = context.degree((*context.scheme.tokens, *context.scheme.hidden)) > 1
            if part.role == "attention" and part.sharded_class is None:  # it may return attention weights too
                # A stage does not run other stages' blocks: there, the block returns the received tensors.
                around = [other for other in self._blocks if name.startswith(f"{other}.") and not whole]
                for watched in {name, *around}:
                    leaving.watch_heads(self._modules[watched], context=context, part=part)
            elif split and (block or (part.role in _TO_HIDDEN and not part.inner and not part.whole_features)):
                leaving.watch_hidden_states(self._modules[name], context=context, features=self._width(), given=block)

    def _context(self, name: str, part: Part) -> SplitContext:
        within = any(name == block or name.startswith(f"{block}.") for block in self._blocks)
        return self._inside if within and not part.whole_tokens else self._outside

    def _width(self, name: str = "") -> int:
        """Return the number of features of the hidden states at a module. Raises ValueError if nothing shows it."""
        around = {holder: self._parts[holder] for holder in enclosing(name) if holder in self._parts}
        for name, part in {**around, **self._parts}.items():
            if part.hidden_width:
                return part.hidden_width
            if part.on_other_stage:
                continue
            if part.role in ("colwise", "single", "head") and name in self._modules:
                return _matrix(self._modules[name], name).shape[0 if part.transposed else 1]
            if part.role == "colwise":
                return self._parameters[name].shape[1]
        raise ValueError(
            "no matrix is the first of a pair, so there is nothing to split, and the width of the hidden states is "
            "unknown. Use tp=1, or rules (Options(tensor_rules=…), model.tensor_rules of a job) that make the matrices "
            "of a pair 'colwise' and 'rowwise'"
        )


def _dim_of_features(part: Part, parameter: Tensor) -> int:
    """Return the dim of a parameter that has features of the hidden states, or inner features of a pair."""
    if part.role == "patches":
        return 0
    if part.role != "inner":
        return parameter.dim() - 1
    if part.dim is not None:
        return parameter.dim() + part.dim
    return max((dim for dim, size in enumerate(parameter.shape) if size != 1), default=parameter.dim() - 1)


def _matrix(module: nn.Module, name: str) -> Tensor:
    """Return the weight of a module. Raises ValueError without a weight of two dims."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        raise ValueError(f"{name} ({type(module).__name__}) has no matrix named weight, as its role needs")
    return weight


def _require_plain_embedding(module: nn.Module, name: str) -> None:
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, option, None):
            raise ValueError(f"{name}: an embedding with {option} cannot be split; leave {option} out, or use tp=1")
