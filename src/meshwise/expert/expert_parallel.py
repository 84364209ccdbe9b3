"""Divide the experts of a plain model over ranks: each rank's mixtures hold and run their local experts alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.comm.api.world import World
from meshwise.expert.exchange import ExpertAxes, ExpertExchange
from meshwise.expert.inner_split import WIDTHS, InnerSplit, inner_split
from meshwise.layout.layout import ANYWHERE, Layout
from meshwise.model.find_mixtures import Mixture
from meshwise.model.forward_replay import ForwardReplay
from meshwise.model.parameter_table import Placement
from meshwise.model.sharded_class import set_sharded_class
from meshwise.plan import Plan


@dataclass(frozen=True)
class SplitMixture:
    """A mixture on this rank, and its exchange. Deep copies share it."""

    mixture: Mixture
    exchange: ExpertExchange
    inner: InnerSplit | None = None
    """Split of the experts' matrices over `etp`; None without `etp`."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self


class SplitExperts(nn.Module):
    """Base class that precedes the class of a module that holds experts: it exchanges tokens around its forward."""

    sharding: SplitMixture

    def forward(self, hidden: Tensor, *rest: Any, **named: Any) -> Tensor:
        """Return the mixture of all ranks' experts for this rank's tokens, with the arguments of the module's own."""
        own: Callable[..., Tensor] = super().forward
        if self.sharding.mixture.form == "rows":
            return self._rows(hidden, own=own)
        given = (*rest, *named.values())
        index = next(each for each in given if isinstance(each, Tensor) and not each.is_floating_point())
        weights = next(each for each in given if isinstance(each, Tensor) and each.is_floating_point())
        experts, (first, _) = self.sharding.mixture.experts, self.sharding.exchange.span
        one_hot = index.dim() == 3
        numbers = index.argmax(-1).masked_fill(index.sum(-1) == 0, experts) if one_hot else index

        def compute(rows: Tensor, local: Tensor) -> Tensor:
            chosen = local.unsqueeze(-1) + (first if self.sharding.mixture.form == "modules" else 0)
            chosen = functional.one_hot(chosen, experts) if one_hot else chosen
            ones = weights.new_ones(len(rows), 1)
            swap = lambda each: chosen if each is index else ones if each is weights else each  # noqa: E731
            return own(rows, *map(swap, rest), **{key: swap(each) for key, each in named.items()})

        return self.sharding.exchange.run(hidden, index=numbers, weights=weights, compute=self._for_any(compute))

    def _rows(self, hidden: Tensor, *, own: Callable[..., Tensor]) -> Tensor:
        """Return the results of rows (experts · n, features), all rows for the first expert, then for the second.

        Rows of zeros stay here: their result is 0, because experts in this form have no biases."""
        experts, (start, stop) = self.sharding.mixture.experts, self.sharding.exchange.span
        number = torch.arange(experts, device=hidden.device).repeat_interleave(len(hidden) // experts)
        index = number.masked_fill((hidden == 0).all(-1), experts)

        def compute(rows: Tensor, local: Tensor) -> Tensor:
            counts = torch.bincount(local, minlength=stop - start)
            most, order = int(counts.max()), local.argsort(stable=True)
            place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[local[order]]
            slots = torch.empty_like(local).index_copy(0, order, place) + local * most
            padded = rows.new_zeros((stop - start) * most, rows.size(-1)).index_copy(0, slots, rows)
            return own(padded)[slots]

        ones = hidden.new_ones(len(hidden), 1)
        return self.sharding.exchange.run(
            hidden, index=index.unsqueeze(-1), weights=ones, compute=self._for_any(compute)
        )

    def _for_any(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `compute` for any number of rows; each parameter of a local expert gets a gradient, maybe of zeros.

        So the reductions of gradients start at the same place of the backward on every rank."""

        def computed(rows: Tensor, local: Tensor) -> Tensor:
            used = set(local.tolist()) if self.sharding.mixture.form == "modules" else set(range(len(rows)))
            left = [part for number, part in enumerate(_local(self, self.sharding)) if number not in used]
            idle = [each.flatten()[:0].sum() for part in left for each in part]
            results = compute(rows, local) if len(rows) else rows
            if len(rows) and self.sharding.inner and self.sharding.inner.bias:
                # Every rank of etp has added the whole bias, and the results will be summed over these ranks.
                bias, parts = self.get_parameter(self.sharding.inner.bias), self.sharding.exchange.inner_ranks
                results = results - bias[local] * (1 - 1 / parts)
            return results + torch.stack(idle).sum() if idle else results

        return computed


def _local(experts: nn.Module, split: SplitMixture) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each local expert of the form `modules`; of another form, all parameters together."""
    if split.mixture.form != "modules":
        yield list(experts.parameters())
        return
    for child in list(_children(experts))[slice(*split.exchange.span)]:
        yield list(child[1].parameters())


def _children(experts: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module of each expert of the form `modules`."""
    return (each for each in experts.named_children() if any(True for _ in each[1].parameters()))


def expert_parallel(
    module: nn.Module,
    *,
    mixtures: Mapping[str, Mixture],
    world: World,
    plan: Plan,
    recall: ForwardReplay,
) -> Mapping[str, Placement]:
    """Split the mixtures of a model in place, and return the placements of their parameters, by name.

    The mixtures get a class that exchanges tokens, and this rank's number of experts.
    Parameters stay full; the caller replaces them by this rank's parts. Mixtures of other pipeline stages stay."""
    placed: dict[str, Placement] = {}
    modules = dict(module.named_modules())
    axes = ExpertAxes.of(world, plan=plan)
    for name, mixture in mixtures.items():
        experts = modules[name]
        if not any(True for _ in experts.parameters()):
            continue
        exchange = ExpertExchange(world, axes=axes, experts=mixture.experts, recall=recall)
        inner = inner_split(experts, mixture=mixture, name=name) if exchange.inner_ranks > 1 else None
        split = SplitMixture(mixture, exchange, inner)
        set_sharded_class(experts, front=SplitExperts, sharding=split)
        if mixture.form == "modules":
            placed |= _modules_placed(experts, name, exchange=exchange, axes=axes)
            continue
        placed |= _stacked_placed(experts, name, inner=inner, axes=axes)
        for key in mixture.counts:
            setattr(experts, key, exchange.shares[world.group(axes.experts).index])
        if inner is not None:
            layout, rank = Layout((axes.inner,)), world.rank
            [size] = layout.local_shape((inner.inner,), mesh=world.mesh, rank=rank)
            for key in WIDTHS:
                if vars(experts).get(key) == inner.inner:
                    setattr(experts, key, size)
    return placed


def _stacked_placed(
    experts: nn.Module, name: str, *, inner: InnerSplit | None, axes: ExpertAxes
) -> Mapping[str, Placement]:
    """Return the placements of stacked experts, and of other parameters inside of their module: these are whole."""
    placed = {}
    for key, parameter in experts.named_parameters(prefix=name):
        own = key.removeprefix(f"{name}.")
        splits: list[tuple[str, ...]] = [()] * parameter.dim()
        cuts = [ANYWHERE] * parameter.dim()
        summed = axes.summed
        if "." in own:
            summed = (*summed, *axes.experts)
        else:
            splits[0] = axes.experts
        if inner is not None and own in inner.cuts:
            dim, cut = inner.cuts[own]
            splits[dim], cuts[dim] = axes.inner, cut
        elif inner is not None:
            summed = (*summed, *axes.inner)
        placed[key] = Placement(Layout(tuple(splits), cuts=tuple(cuts)), summed)
    return placed


def _modules_placed(
    experts: nn.Module, name: str, *, exchange: ExpertExchange, axes: ExpertAxes
) -> Mapping[str, Placement]:
    """Return the placements of experts that are modules: whole, on the ranks of the expert alone."""
    placed = {}
    owners = [rank for rank, size in enumerate(exchange.shares) for _ in range(size)]
    for (child, expert), owner in zip(_children(experts), owners, strict=True):
        for key, parameter in expert.named_parameters(prefix=f"{name}.{child}"):
            held_at = (("ep", owner),) if len(exchange.shares) > 1 else ()
            placed[key] = Placement(Layout.replicated(parameter.dim()), axes.summed, held_at)
    return placed


def imbalances(modules: Sequence[nn.Module], *, world: World) -> Mapping[str, float]:
    """Return the load of the busiest expert over the mean load, by name of the mixture, and forget the loads.

    Every rank calls it. The loads are summed over all forwards since the last call, with spare rows. Mixtures that no
    rank has run are left out."""
    found = {name: each for module in modules for name, each in module.named_modules()}
    exchanges = {name: each.sharding.exchange for name, each in found.items() if isinstance(each, SplitExperts)}
    factors = {}
    for name, exchange in exchanges.items():
        total = exchange.load.clone()
        exchange.load.zero_()
        world.all_reduce(total, axes=world.mesh.others(["pp"])).wait()
        if mean := float(total.double().mean()):
            factors[name] = float(total.max()) / mean
    everywhere: dict[str, float] = {}
    for stage in world.exchange(factors, axes="pp"):
        everywhere |= stage
    return everywhere
