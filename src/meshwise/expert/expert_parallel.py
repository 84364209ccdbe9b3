"""Divide the experts of a plain model over ranks: each rank's mixtures hold and run their local experts alone."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.expert.exchange import ExpertAxes, ExpertExchange
from meshwise.expert.find_mixtures import Mixture
from meshwise.layout import Layout
from meshwise.model.forward_replay import ForwardReplay
from meshwise.model.parameter_table import Placement
from meshwise.model.sharded_class import set_sharded_class


class SplitExperts(nn.Module):
    """Base class that precedes the class of a module that holds experts: it exchanges tokens around its forward."""

    sharding: ExpertExchange

    def forward(self, hidden: Tensor, *rest: Any, **named: Any) -> Tensor:
        """Return the mixture of all ranks' experts for this rank's tokens, with the arguments of the module's own."""
        given = (*rest, *named.values())
        index = next(each for each in given if isinstance(each, Tensor) and not each.is_floating_point())
        weights = next(each for each in given if isinstance(each, Tensor) and each.is_floating_point())

        def compute(rows: Tensor, local: Tensor) -> Tensor:
            if len(rows) == 0:
                return rows + self._zero()
            chosen, ones = local.unsqueeze(-1), weights.new_ones(len(rows), 1)
            swap = lambda each: chosen if each is index else ones if each is weights else each  # noqa: E731
            own: Tensor = super(SplitExperts, self).forward(
                rows, *map(swap, rest), **{key: swap(each) for key, each in named.items()}
            )
            return own

        return self.sharding.run(hidden, index=index, weights=weights, compute=compute)

    def _zero(self) -> Tensor:
        """Return 0, computed from no element of any parameter, so that each gets a gradient of zeros.

        So the reductions of gradients start at the same place of the backward on every rank.
        """
        return torch.stack([each.flatten()[:0].sum() for each in self.parameters()]).sum()


def expert_parallel(
    module: nn.Module,
    *,
    mixtures: Mapping[str, Mixture],
    world: World,
    tensor: tuple[str, ...],
    recall: ForwardReplay,
) -> Mapping[str, Placement]:
    """Split the mixtures of a model in place, and return the placements of their parameters, by name.

    `tensor`: the axes of tp. The mixtures get a class that exchanges tokens, and this rank's number of experts.
    Parameters stay full; the caller replaces them by this rank's parts. Mixtures of other pipeline stages stay.
    """
    placed: dict[str, Placement] = {}
    modules = dict(module.named_modules())
    axes = ExpertAxes.of(world, tensor=tensor)
    for name, mixture in mixtures.items():
        experts = modules[name]
        own = {key: each for key, each in experts.named_parameters(prefix=name) if key not in placed}
        if not own:
            continue
        exchange = ExpertExchange(world, axes=axes, experts=mixture.experts, recall=recall)
        set_sharded_class(experts, front=SplitExperts, sharding=exchange)
        for key in mixture.counts:
            setattr(experts, key, exchange.local_experts)
        for key, parameter in own.items():
            splits: list[tuple[str, ...]] = [()] * parameter.dim()
            splits[0] = axes.experts
            placed[key] = Placement(Layout(tuple(splits)), axes.summed)
    return placed


def joins_rows(mixtures: Mapping[str, Mixture], *, world: World) -> bool:
    """Return whether ranks exchange tokens in every forward, so that also ranks without rows have to run it."""
    return bool(mixtures) and world.group(world.mesh.expand(["ep"])).size > 1
