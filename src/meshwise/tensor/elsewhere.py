"""What a stage of a pipeline knows of parts whose parameters other stages have.

A stage runs the whole model's forward, in which the pieces of others return what was received, or nothing. How those
cut the stream stays: what an embedding returns is a part on every stage, and what was to be done with it there is.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from meshwise.comm.world import World
from meshwise.layout.layout import Layout
from meshwise.plan import Plan
from meshwise.tensor.families.matrix import CONVOLUTIONS
from meshwise.tensor.part import Part
from meshwise.tensor.twins import scheme_on


def stream_width(parts: Mapping[str, Part], *, plan: Plan, world: World) -> tuple[int, int]:
    """How many features of the stream this rank has between blocks, and how many there are; 0 without blocks."""
    whole = max((part.stream for part in parts.values()), default=0)
    if not whole:
        return 0, 0
    layout = Layout((scheme_on(world.mesh, plan=plan, blocks=True).stream,))
    return layout.local_shape((whole,), mesh=world.mesh, rank=world.rank)[0], whole


def makers(parts: Mapping[str, Part], *, module: nn.Module) -> Mapping[str, int]:
    """The modules of a model that make the stream of something else, and those around them; each with the dim of what
    it returns that has the features a rank has of it.
    """
    found: dict[str, int] = {}
    for name, part in parts.items():
        if part.role in ("embedding", "positions", "patches") and not part.whole_features:
            maker = module.get_submodule(name)
            words = name.split(".")
            found |= {".".join(words[:depth]): -1 for depth in range(1, len(words))}
            found[name] = -1 - len(maker.kernel_size) if isinstance(maker, CONVOLUTIONS) else -1
    return found


def parts_of_stage(parts: Mapping[str, Part], *, module: nn.Module) -> dict[str, Part]:
    """Of a model's parts those that matter to a stage of it: its own, and of others' those that tell how the stream is
    cut. Where tokens are split and put together is known by the blocks, of which heads their attentions return scores,
    by those, and where the features are put together, by who makes them.
    """
    names = [name.split(".") for name, _ in module.named_parameters(remove_duplicate=False)]
    held = {".".join(words[:depth]) for words in names for depth in range(len(words) + 1)}
    modules = {name for name, _ in module.named_modules(remove_duplicate=False)}
    return {
        name: part
        for name, part in parts.items()
        if name in held or part.role == "block" or part.returns_scores or (part.whole_features and name in modules)
    }
