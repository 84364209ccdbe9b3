"""Send tokens to the ranks of their experts and their results back: the exchange of one mixture on this rank.

A mixture computes `y[t] = sum over k of weights[t, k] * expert[index[t, k]](x[t])`. Its router has already chosen
`index` and `weights`, each (tokens, k). A pair is a token and one of its choices; a pair with an index past the last
expert is dropped. The ranks of tp have equal tokens: each takes a part of them before the exchange, and gathers all
after it. Under `etp`, an all-reduce sums the results of the experts. No token is dropped, as in MegaBlocks (Gale et
al., arXiv 2211.15841, section 4). With `dispatch_parts`, a part of the tokens travels while the experts compute another
one, as in Tutel (Hwang et al., arXiv 2206.03382). docs/experts.md has the steps and what a rank sends.

    | dispatch     tokens to experts                               results to tokens
    | all-to-all   all-to-all of the tokens of each pair           all-to-all (GShard, arXiv 2006.16668, section 3)
    | all-gather   all-gather of tokens, choices and weights       reduce-scatter of the sums of each rank's experts"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base.mesh import even_split
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.memory.recompute import RecomputedBlock
from meshwise.model.forward import ForwardReplay
from meshwise.plan import Plan


@dataclass(frozen=True)
class ExpertAxes:
    """Axes of one world over which a mixture is split.

    | experts   different experts (`ep`)
    | inner     different parts of each expert's matrices (`etp`)
    | copies    equal tokens outside of the mixture, different tokens inside: the ranks of tp that are not in `inner`
    | parts     different tokens outside of the mixture, equal tokens inside: `inner` under sequence parallelism
    | summed    gradients of an expert are summed over them: all axes but pp, `experts` and `inner`"""

    experts: tuple[str, ...]
    inner: tuple[str, ...]
    copies: tuple[str, ...]
    parts: tuple[str, ...]
    summed: tuple[str, ...]

    @classmethod
    def of(cls, world: World, *, plan: Plan) -> "ExpertAxes":
        """Return the axes on a world that has the plan's mesh."""
        mesh = world.mesh
        experts, inner = mesh.expand(["ep"]), mesh.expand(["etp"])
        tensor = mesh.others(("pp", *plan.loss_axes))  # of tp, and `kv` where several ranks share a KV head
        split = plan.sequence_parallel == 1
        copies = () if split else tuple(axis for axis in tensor if axis not in inner)
        return cls(experts, inner, copies, inner if split else (), mesh.others(("pp", "ep", "etp")))


Compute: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Function of rows (n, features) and the number (n,) of each row's local expert that returns results (n, features)."""


class LocalExperts(NamedTuple):
    """Computations of one rank's experts.

    | compute   the experts of this rank
    | copied    returns the computation of copies of experts, given a function that starts to gather their parts of a
    |           parameter; None where experts cannot be copied"""

    compute: Compute
    copied: Callable[[Callable[[Tensor], gradient.PendingResult]], Compute] | None = None


class _Routing(NamedTuple):
    """Routing of pairs in one dispatch.

    | order      numbers of the pairs that are kept, sorted by expert; pair p is choice p % k of token p // k
    | sent       rows sent to each rank; one number where no row moves
    | received   rows received from each rank
    | local      number among the computing experts of each received row's expert"""

    order: Tensor
    sent: list[int]
    received: list[int]
    local: Tensor


class _RoutedTokens(NamedTuple):
    """Tokens (n, features), and the chosen experts of each token and their weights, (n, k) each."""

    tokens: Tensor
    chosen: Tensor
    weights: Tensor


def gathers(plan: Plan, *, choices: int, experts: int) -> bool:
    """Return whether `plan` dispatches by all-gather, for `choices` of each token among `experts` experts.

    For each token of H features, the all-to-alls move 2 · choices · H (ep-1)/ep elements in a forward, and all-gather
    and reduce-scatter move 2 · H (ep-1). `auto` takes the fewer. A choice of all experts takes the all-to-all."""
    chosen = plan.dispatch == "auto" and plan.dispatch_parts == 1 and not plan.replicate
    return plan.dispatch == "all-gather" or (chosen and 1 < plan.ep < choices < experts)


class ExpertExchange:
    """Exchange of one mixture on this rank; deep copies of its module share it."""

    def __init__(
        self, world: World, *, axes: ExpertAxes, plan: Plan, experts: int, recall: ForwardReplay, imbalance: float = 1.0
    ) -> None:
        """`experts`: number of experts over all ranks. `recall`: results that a repeated forward takes again.

        `imbalance`: without values, load of this rank's experts as a multiple of the even share."""
        self.world, self._axes, self._plan, self._experts = world, axes, plan, experts
        self._recall, self._imbalance = recall, imbalance
        self.shares = [stop - start for start, stop in even_split(experts, world.group(axes.experts).size)]
        """Number of experts of each rank along `ep`."""
        self.index = index = world.group(axes.experts).index
        """Index of this rank along `ep`."""
        self.span = sum(self.shares[:index]), sum(self.shares[: index + 1])
        """Numbers [start, stop) of this rank's experts."""
        self.kept = 1.0
        """Share of the pairs that a router without values keeps; below 1 in the form `rows`."""
        self.received = 0
        """Rows that this rank's experts got in the last dispatch, and rows of its own for copies of experts."""
        self.even_share = 0.0
        """Rows that they would have got there from a balanced router without drops."""
        self.copies = plan.replicate
        """Number of experts that are copied to every rank along `ep` in each dispatch."""
        self.inner_ranks = world.group(axes.inner).size
        """Number of ranks that split each expert's matrices (`etp`)."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    def run(self, hidden: Tensor, *, index: Tensor, weights: Tensor, experts: LocalExperts) -> Tensor:
        """Return the output of the mixture, of the shape of `hidden` (…, features).

        `index`, `weights`: expert and weight of each choice of each token, (tokens, k)."""
        tokens, world = hidden.reshape(-1, hidden.size(-1)), self.world
        x = _RoutedTokens(tokens, index.reshape(len(tokens), -1), weights.reshape(len(tokens), -1))
        copies, parts = world.group(self._axes.copies), world.group(self._axes.parts)
        if copies.size > 1:
            bounds = even_split(len(tokens), copies.size)
            along: Any = {"world": world, "axes": copies.axes, "sizes": [stop - start for start, stop in bounds]}
            tokens, weights = (gradient.take(each, **along).wait() for each in (x.tokens, x.weights))
            mixed = self._in_chunks(_RoutedTokens(tokens, x.chosen[slice(*bounds[copies.index])], weights), experts)
            mixed = gradient.replicate(mixed, **along).wait()
        elif parts.size > 1:
            x, sizes = self._gathered(x, axes=parts.axes, collective=gradient.replicate)
            mixed = gradient.take(self._in_chunks(x, experts), world=world, axes=parts.axes, sizes=sizes).wait()
        else:
            mixed = self._in_chunks(x, experts)
        return mixed.reshape(hidden.shape)

    def _gathered(
        self, x: _RoutedTokens, *, axes: tuple[str, ...], collective: Callable[..., gradient.PendingResult]
    ) -> tuple[_RoutedTokens, list[int]]:
        """Return the tokens of all ranks along `axes`, gathered by `collective`, and how many each rank has."""
        world, sizes = self.world, self.world.exchange(len(x.tokens), axes=axes)
        gather = partial(collective, world=world, axes=axes, sizes=sizes)
        tokens, weights = (gather(each).wait() for each in (x.tokens, x.weights))
        index = x.chosen.new_empty(len(tokens), x.chosen.size(1))
        world.all_gather(x.chosen.contiguous(), into=list(index.split(sizes)), axes=axes).wait()
        return _RoutedTokens(tokens, index, weights), sizes

    def _in_chunks(self, x: _RoutedTokens, experts: LocalExperts) -> Tensor:
        """Return the output for these tokens; with `chunk`, dispatch so many at a time.

        All ranks run as many chunks. A chunk keeps its tokens alone, and is dispatched again in the backward."""
        if not self._plan.chunk:
            return self._mixed(x, experts)
        parts, longest = [], max(self.world.exchange(len(x.tokens), axes=self._axes.experts))
        for start in range(0, max(1, longest), self._plan.chunk):
            own = _RoutedTokens(*(each[start : start + self._plan.chunk] for each in x))
            chunk = RecomputedBlock(_Chunk(self, experts), name="a chunk of tokens", mode="full", recall=self._recall)
            parts.append(chunk(*own))
        return torch.cat(parts)

    def _mixed(self, x: _RoutedTokens, experts: LocalExperts) -> Tensor:
        """Return the output for these tokens, by one of the two dispatches."""
        if not gathers(self._plan, choices=x.chosen.size(1), experts=self._experts):
            moving, copied = self._hot(x.chosen, experts)
            return self._combined(x, [*copied, *((each, experts.compute) for each in self._routed(moving))])
        axes = self._axes.experts
        everyone, sizes = self._gathered(x, axes=axes, collective=gradient.all_gather)
        mixed = self._combined(everyone, [(self._own_pairs(x.chosen, everyone.chosen), experts.compute)])
        return gradient.reduce_scatter(mixed, world=self.world, axes=axes, sizes=sizes).wait()

    def _combined(self, x: _RoutedTokens, dispatches: Sequence[tuple[_Routing, Compute]]) -> Tensor:
        """Return the weighted sums of results of the pairs in `dispatches`: send the rows, compute, return the results.

        All rows are sent before the first are computed, and results return while the next are computed."""
        routings, choices = [routing for routing, _ in dispatches], x.chosen.size(1)
        self.received = sum(sum(each.received) for each in routings)
        self.even_share = (
            self.kept * x.chosen.numel() * len(routings[-1].sent) * self.shares[self.index] / self._experts
        )
        moved = [self._moved(x.tokens[each.order // choices], each.sent, each.received) for each in routings]
        returned = []
        for (routing, compute), arrived in zip(dispatches, moved, strict=True):
            rows = arrived()
            if torch.is_grad_enabled() and not rows.requires_grad:
                # Then every rank takes part in the backward of the return, also a rank whose experts get no row.
                rows = rows.detach().requires_grad_()
            results = self._computed(rows, local=routing.local, compute=compute)
            returned.append(self._moved(results, routing.received, routing.sent))
        order, found = torch.cat([each.order for each in routings]), [each() for each in returned]
        weighted: Tensor = (torch.cat(found) if found[1:] else found[0]) * x.weights.reshape(-1)[order].unsqueeze(-1)
        if len(order) == x.chosen.numel():  # nothing is dropped: a sum in a fixed order, also on CUDA
            mixed: Tensor = weighted[order.argsort()].unflatten(0, x.chosen.shape).sum(1)
        else:
            mixed = weighted.new_zeros(len(x.tokens), weighted.size(-1)).index_add(0, order // choices, weighted)
        return mixed.to(x.tokens.dtype)

    def _computed(self, rows: Tensor, *, local: Tensor, compute: Compute) -> Tensor:
        """Return the results of this rank's experts in the dtype of `rows`, summed over the ranks of `etp`."""
        axes = self._axes.inner
        if self.inner_ranks == 1:
            results: Tensor = compute(rows, local)
            return results.to(rows.dtype)
        part = compute(gradient.copy(rows, world=self.world, axes=axes).wait(), local)
        return gradient.all_reduce(part, world=self.world, axes=axes).wait().to(rows.dtype)

    def _moved(self, rows: Tensor, sent: list[int], received: list[int]) -> Callable[[], Tensor]:
        """Start to send rows to the ranks of `ep`; return a function that waits for the received rows."""
        if len(sent) == 1:
            return lambda: rows
        return gradient.all_to_all(
            rows, world=self.world, axes=self._axes.experts, split_dim=0, cat_dim=0, sizes=(sent, received)
        ).wait

    def _hot(self, index: Tensor, experts: LocalExperts) -> tuple[Tensor, list[tuple[_Routing, Compute]]]:
        """Return the choices whose rows travel, and the routing of the other pairs to copies of experts on this rank.

        As in FasterMoE (He et al., PPoPP 2022), the copies are of the experts with the most pairs over the ranks."""
        number, chosen = self.copies, index.reshape(-1)
        if not number or experts.copied is None:
            return index, []
        if index.is_meta:
            pairs = math.ceil(len(chosen) * number / self._experts)
            sizes = [stop - start for start, stop in even_split(number, len(self.shares))]
            own, moving = index.new_empty(sizes[self.index]), chosen[pairs:].unsqueeze(-1)
            self.world.all_reduce(index.new_empty(self._experts), axes=self._axes.experts).wait()
            routing = _unmoved(index, math.ceil(pairs * self.kept))
        else:
            hot = self._recall.once(lambda: self._hottest(chosen))
            copies = hot.new_full((self._experts + 1,), number).index_copy(0, hot, torch.arange(number).to(hot))
            local = copies[chosen.clamp(max=self._experts)]
            moving, routing = index.masked_fill((local < number).view_as(index), self._experts), _kept(local, number)
            sizes = [int(part.sum()) for part in (copies[:-1] < number).cpu().split(self.shares)]
            own = hot[(hot >= self.span[0]) & (hot < self.span[1])] - self.span[0]

        def gather(parameter: Tensor) -> gradient.PendingResult:
            return gradient.all_gather(parameter[own], world=self.world, axes=self._axes.experts, sizes=sizes)

        return moving, [(routing, experts.copied(gather))]

    def _hottest(self, chosen: Tensor) -> Tensor:
        """Return the experts with the most pairs over the ranks of `ep`, ascending; of equal ones the first."""
        total = torch.bincount(chosen, minlength=self._experts)[: self._experts]
        self.world.all_reduce(total, axes=self._axes.experts).wait()
        return total.argsort(descending=True, stable=True)[: self.copies].sort().values

    def _own_pairs(self, index: Tensor, choices: Tensor) -> _Routing:
        """Return the routing to this rank's experts in `choices` of all ranks; `index`: choices of this rank."""
        own, pairs = self.span[1] - self.span[0], math.ceil(choices.numel() * self.kept)
        if index.is_meta:
            return _unmoved(index, min(pairs, math.ceil(pairs * own / self._experts * self._imbalance)))
        local = (choices - self.span[0]).reshape(-1)
        return _kept(local.masked_fill((local < 0) | (local >= own), own), own)

    def _routed(self, index: Tensor) -> list[_Routing]:
        """Return the routing of each part of this rank's pairs, after one exchange of counts."""
        parts = [index[start:stop] for start, stop in even_split(len(index), self._plan.dispatch_parts)]
        if index.is_meta:
            self._exchange_counts(index.new_empty(len(parts), self._experts))
            return [self._balanced(part) for part in parts]
        orders, counts, arriving = self._recall.once(lambda: self._counted(parts))
        own = self.span[1] - self.span[0]
        numbers, start, found = torch.arange(own, device=index.device).repeat(len(self.shares)), 0, []
        for part, order, to, come in zip(parts, orders, counts, arriving, strict=True):
            sent = [int(each.sum()) for each in to.cpu().split(self.shares)]
            received = come.cpu().view(-1, own).sum(1).tolist()
            found.append(_Routing(order + start, sent, received, numbers.repeat_interleave(come)))
            start += part.numel()
        return found

    def _counted(self, parts: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Return, for each part, the kept pairs sorted by expert, the pairs for each expert, and the rows that arrive.

        Rows that arrive are counted for each rank, and of each rank for each expert of this rank."""
        chosen = [part.reshape(-1) for part in parts]
        counts = torch.stack([torch.bincount(each, minlength=self._experts)[: self._experts] for each in chosen])
        kept = zip(chosen, counts.sum(1).tolist(), strict=True)
        return tuple(each.argsort(stable=True)[:number] for each, number in kept), counts, self._exchange_counts(counts)

    def _balanced(self, index: Tensor) -> _Routing:
        """Return a routing without values, as of a router that gives equally many pairs to the experts of each rank.

        This rank receives `imbalance` times as many, at most all."""
        group, pairs = self.world.group(self._axes.experts), math.ceil(index.numel() * self.kept)
        share = (self.span[1] - self.span[0]) / self._experts if group.size > 1 else 1.0
        mine = min(pairs, math.ceil(pairs * share * self._imbalance))
        sent = [stop - start for start, stop in even_split(pairs - mine, max(1, group.size - 1))][: group.size - 1]
        sent.insert(group.index, mine)
        order = torch.arange(pairs, device=index.device)
        return _Routing(order, sent, [mine] * group.size, index.new_empty(mine * group.size))

    def _exchange_counts(self, counts: Tensor) -> Tensor:
        """Send each rank its part of `counts` (parts, experts); return the received ones (parts, ranks · experts)."""
        arriving = counts.new_empty(len(self.shares), len(counts), self.span[1] - self.span[0])
        sent = [part.contiguous() for part in counts.split(self.shares, dim=1)]
        work = self.world.all_to_all(sent, into=list(arriving), axes=self._axes.experts)
        self.world.side_by_side.hand_over()
        work.wait()
        return arriving.transpose(0, 1).flatten(1)


def _kept(local: Tensor, experts: int) -> _Routing:
    """Return the routing of pairs that do not move; `local` (pairs,): computing expert, or `experts` for none."""
    order = local.argsort(stable=True)[: int((local < experts).sum())]
    return _Routing(order, [len(order)], [len(order)], local[order])


def _unmoved(index: Tensor, pairs: int) -> _Routing:
    """Return the routing of so many pairs that do not move, without values."""
    return _Routing(torch.arange(pairs, device=index.device), [pairs], [pairs], index.new_empty(pairs))


class _Chunk(nn.Module):
    """Dispatch of some of this rank's tokens, as a module that is recomputed in the backward."""

    def __init__(self, exchange: ExpertExchange, experts: LocalExperts) -> None:
        super().__init__()
        self.exchange, self.experts = exchange, experts

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the output for these tokens."""
        return self.exchange._mixed(_RoutedTokens(tokens, index, weights), self.experts)
