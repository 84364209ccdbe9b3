"""Derive the parts of a pipeline stage, and the sizes of hidden states, when other stages have the parameters.

A stage runs the whole model's forward, in which the pieces of other stages return what was received, or nothing. Their
layout stays: what an embedding returns is split in the same way on every stage.
"""

import dataclasses
from collections.abc import Callable, Mapping

from torch import nn

from meshwise.comm.api.world import World
from meshwise.layout.layout import Layout
from meshwise.plan import Plan
from meshwise.tensor.core.part import Part
from meshwise.tensor.core.split_context import ShardSizes
from meshwise.tensor.detect.known_names import enclosing
from meshwise.tensor.detect.matrix_modules import CONVOLUTIONS
from meshwise.tensor.schemes.kv_replicas import scheme_on


def stream_width(parts: Mapping[str, Part], *, plan: Plan, world: World) -> tuple[int, int]:
    """Return how many features of the hidden states this rank has between blocks, and how many there are; 0, 0 without
    blocks.
    """
    whole = max((part.stream for part in parts.values()), default=0)
    if not whole:
        return 0, 0
    layout = Layout((scheme_on(world.mesh, plan=plan, blocks=True).stream,))
    return layout.local_shape((whole,), mesh=world.mesh, rank=world.rank)[0], whole


def stream_tokens(extents: ShardSizes, *, plan: Plan, world: World) -> Callable[[], tuple[int, int]]:
    """Return a function for the forward under way: how many tokens this rank has between blocks, and how many there
    are; 0, 0 if they are not split.
    """
    axes = scheme_on(world.mesh, plan=plan, blocks=True).tokens

    def counts() -> tuple[int, int]:
        sizes = extents.tokens
        return (0, 0) if sizes is None else (sizes[world.group(axes).index], sum(sizes))

    return counts


def feature_dims(parts: Mapping[str, Part], *, module: nn.Module) -> Mapping[str, int]:
    """Return the feature dim of the output of each module that makes hidden states, and of each module around one."""
    found: dict[str, int] = {}
    for name, part in parts.items():
        if part.role in ("embedding", "positions", "patches") and not part.whole_features:
            maker = module.get_submodule(name)
            found |= dict.fromkeys(enclosing(name)[:-1], -1)
            found[name] = -1 - len(maker.kernel_size) if isinstance(maker, CONVOLUTIONS) else -1
    return found


def parts_of_stage(parts: Mapping[str, Part], *, module: nn.Module, model: nn.Module, last: bool) -> dict[str, Part]:
    """Return the parts of a model for a stage: those whose parameters other stages have are marked `elsewhere`.

    Logits are split on the `last` stage only, which computes the loss. Other stages send them whole.
    """
    here, everywhere = _around_parameters(module), _around_parameters(model)
    found = {}
    for name, part in parts.items():
        changed = dataclasses.replace(part, elsewhere=True) if name in everywhere and name not in here else part
        found[name] = dataclasses.replace(changed, whole_features=True) if part.role == "head" and not last else changed
    return found


def _around_parameters(module: nn.Module) -> set[str]:
    """Return the names of a module's parameters, and of the modules around them."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return {holder for name in names for holder in (name, *enclosing(name))}
