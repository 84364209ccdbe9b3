"""Slices of activations that a rank has at every point of the forward, and the parts of a pipeline stage.

Dropout draws the same masks under every plan, so it must know which slice of a mask a rank's tensor needs
(`activation_regions`). The slice follows from the layouts of parameters, and changes only at split modules:

    | after              features           tokens                                 rows
    | embedding          hidden             all                                    hidden
    | entry of block 0   hidden             this rank's, in sequence parallelism   hidden
    | colwise linear     inner, or heads    all                                    inner
    | rowwise linear     hidden             this rank's, in sequence parallelism   hidden
    | last block         hidden             all                                    hidden

"Hidden" is this rank's part of the hidden states, "inner" its part inside a pair. Their rows differ only under 3D."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

from torch import nn

from meshwise.layout.layout import DimSplit
from meshwise.model.random_draws import ActivationRegion, DimSlice, RegionStarts
from meshwise.plan import Plan
from meshwise.tensor.core.module_role import Part
from meshwise.tensor.core.sharded_layers import Projection, ShardedLinear, ShardedMultiheadAttention
from meshwise.tensor.core.split_context import SplitContext
from meshwise.tensor.detect.attention_names import enclosing
from meshwise.tensor.tp_schemes import scheme_on


def activation_regions(
    module: nn.Module, *, plan: Plan, parts: Mapping[str, Part], outside: SplitContext, absent: frozenset[str]
) -> tuple[RegionStarts, RegionStarts]:
    """Return two mappings from module names to functions that return an `ActivationRegion`.

    The regions of the first mapping begin before the module runs, the regions of the second mapping after it.
    `parts` and `outside`: as given to `tensor_parallel`; for a stage of a pipeline, the parts of the whole model.
    `absent`: names of the modules that other stages run. Their inner modules are not called here, so the region of
    the last inner module begins after the absent module. Both mappings are empty if the hidden width is unknown."""
    projections = dict(_projections(module, parts))
    width = _width(parts, projections)
    if not width:
        return {}, {}
    inside = dataclasses.replace(outside, scheme=scheme_on(outside.world.mesh, plan=plan, blocks=True))
    blocks = [name for name, part in parts.items() if part.role == "block"]
    before: dict[str, Callable[[], ActivationRegion]] = {}
    after: dict[str, Callable[[], ActivationRegion]] = {}
    for name, part in parts.items():
        within = any(name.startswith(f"{block}.") for block in blocks)
        if part.role == "head":
            after[name] = ActivationRegion  # a draw on logits covers all of them
        elif part.role in ("rowwise", "single", "embedding", "positions", "patches"):
            hidden = functools.partial(_hidden, inside if within else outside, width)
            after[name] = ActivationRegion if part.whole_features else hidden
        elif part.role == "whole" and not within:
            before[name] = ActivationRegion
        elif part.role == "dropout":
            context, adapted = inside if within else outside, module.get_submodule(name.partition(".lora_dropout")[0])
            split = functools.partial(_inner_features, context, vars(adapted)["in_features"], part.cut)
            before[name] = split if part.inner else functools.partial(_hidden, context, width)
        elif part.shared:
            continue  # several ranks hold these keys and values; the queries show this rank's heads
        elif name in projections and part.role == "colwise":
            after[name] = functools.partial(_inner, projections[name])
        elif name in projections:
            before[name] = functools.partial(_inner, projections[name])
        if not within and (name in before or name in after):
            after |= dict.fromkeys(absent.intersection(enclosing(name)), after.get(name, ActivationRegion))
    for stack in {block.rpartition(".")[0]: None for block in blocks}:
        names = [block for block in blocks if block.rpartition(".")[0] == stack]
        before[names[0]] = functools.partial(_hidden, inside, width)
        whole = parts[names[-1]].whole_features
        after[names[-1]] = ActivationRegion if whole else functools.partial(_hidden, outside, width)
    return before, after


def _width(parts: Mapping[str, Part], projections: Mapping[str, Projection]) -> int:
    """Return the number of features of the hidden states, or 0 if it is unknown."""
    of_blocks = max((part.hidden_width for part in parts.values()), default=0)
    closing = (own for own in projections.values() if own.part.role in ("rowwise", "single"))
    return of_blocks or next((sum(own.out_sizes) for own in closing), 0)


def _projections(module: nn.Module, parts: Mapping[str, Part]) -> Iterator[tuple[str, Projection]]:
    """Yield the name and projection of each linear; for torch's attention, its name and its colwise projection."""
    for name, inner in module.named_modules():
        if isinstance(inner, ShardedLinear) and name in parts:
            yield name, inner.sharding
        elif isinstance(inner, ShardedMultiheadAttention):
            yield name, next(own for own in inner.sharding.projections.values() if own.part.role == "colwise")


def _inner(projection: Projection) -> ActivationRegion:
    """Return the region after a colwise linear: this rank's slice of its first section, in features or in heads."""
    context = projection.context
    world, data, inner = context.world, context.scheme.rows, context.scheme.inner_rows
    offset = world.group(inner).index - world.group(data).index if data != inner else 0
    if context.degree(projection.product.features) == 1:
        return ActivationRegion(rank_offset=offset)
    part = projection.bias_layout.pieces((sum(projection.out_sizes),), mesh=world.mesh, rank=world.rank)[0]
    start, size = part.offsets[0], part.sizes[0]
    return ActivationRegion((DimSlice(-1, start, size),), scores=(DimSlice(-3, start, size),), rank_offset=offset)


def _inner_features(context: SplitContext, features: int, cut: DimSplit) -> ActivationRegion:
    """Return the region of this rank's slice of `features` inner features."""
    axes = context.scheme.inner
    sizes, index = context.sizes(features, axes=axes, cut=cut), context.world.group(axes).index
    return ActivationRegion(hidden=(DimSlice(-1, sum(sizes[:index]), sizes[index]),))


def _hidden(context: SplitContext, width: int) -> ActivationRegion:
    """Return the region of hidden states with `width` features."""
    features, tokens = context.hidden_sizes(width), context.shard_sizes.tokens or ()
    cuts = []
    for dim, axes, sizes in ((-1, context.scheme.hidden, features), (-2, context.scheme.tokens, tokens)):
        if context.degree(axes) > 1 and sum(sizes) > 1:
            index = context.world.group(axes).index
            cuts.append(DimSlice(dim, sum(sizes[:index]), sizes[index]))
    return ActivationRegion(hidden=tuple(cuts))


def parts_of_stage(parts: Mapping[str, Part], *, module: nn.Module, model: nn.Module, last: bool) -> dict[str, Part]:
    """Return the parts of `model` for stage `module`; a part has `on_other_stage` if the stage lacks its parameters.

    Only the `last` stage keeps logits split, because it computes the loss. Other stages send whole logits."""
    here, everywhere = _around_parameters(module), _around_parameters(model)
    found = {}
    for name, part in parts.items():
        changed = dataclasses.replace(part, on_other_stage=True) if name in everywhere and name not in here else part
        found[name] = dataclasses.replace(changed, whole_features=True) if part.role == "head" and not last else changed
    return found


def _around_parameters(module: nn.Module) -> set[str]:
    """Return the names of a module's parameters, and of the submodules around them."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return {holder for name in names for holder in (name, *enclosing(name))}
