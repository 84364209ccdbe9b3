"""Derive the parts of a pipeline stage, and the sizes of its hidden states, from the parts of the whole model.

A stage runs the whole model's forward. There, a module of another stage returns the tensors received from that stage,
or NaN. The hidden states have the same layout on every stage."""

import dataclasses
from collections.abc import Callable, Mapping

from torch import nn

from meshwise.comm.api.world import World
from meshwise.layout.layout import Layout
from meshwise.plan import Plan
from meshwise.tensor.core.part import Part
from meshwise.tensor.core.split_context import ShardSizes
from meshwise.tensor.detect.known_names import enclosing
from meshwise.tensor.detect.matrix_modules import PATCH_CONVOLUTIONS
from meshwise.tensor.schemes import scheme_on


def local_and_total_width(parts: Mapping[str, Part], *, plan: Plan, world: World) -> tuple[int, int]:
    """Return the features of the hidden states between blocks: on this rank and in total; (0, 0) without blocks."""
    whole = max((part.stream for part in parts.values()), default=0)
    if not whole:
        return 0, 0
    layout = Layout((scheme_on(world.mesh, plan=plan, blocks=True).stream,))
    return layout.local_shape((whole,), mesh=world.mesh, rank=world.rank)[0], whole


def local_and_total_tokens(shard_sizes: ShardSizes, *, plan: Plan, world: World) -> Callable[[], tuple[int, int]]:
    """Return a function that returns the tokens between blocks: on this rank and in total; (0, 0) if not split."""
    axes = scheme_on(world.mesh, plan=plan, blocks=True).tokens

    def counts() -> tuple[int, int]:
        sizes = shard_sizes.tokens
        return (0, 0) if sizes is None else (sizes[world.group(axes).index], sum(sizes))

    return counts


def feature_dims(parts: Mapping[str, Part], *, module: nn.Module) -> Mapping[str, int]:
    """Return the feature dim of the outputs of embeddings and patches, and of modules around them, by name."""
    found: dict[str, int] = {}
    for name, part in parts.items():
        if part.role in ("embedding", "positions", "patches") and not part.whole_features:
            maker = module.get_submodule(name)
            found |= dict.fromkeys(enclosing(name)[:-1], -1)
            found[name] = -1 - len(maker.kernel_size) if isinstance(maker, PATCH_CONVOLUTIONS) else -1
    return found


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
