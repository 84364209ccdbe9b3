"""Send tokens to the ranks of their experts and their results back: the exchange of one mixture on this rank.

A mixture computes `y[t] = sum over k of weights[t, k] * expert[index[t, k]](x[t])`. Its router has already chosen
`index` and `weights`, each (tokens, k). A pair is a token and one of its choices; a pair with an index past the last
expert is dropped. The ranks of tp have equal tokens: each takes a part of them before, and gathers all tokens after.
Under `etp`, an all-reduce sums the results of the experts. No token is dropped, as in MegaBlocks (Gale et al., arXiv
2211.15841, section 4). docs/experts.md has the steps and what a rank sends.

    | dispatch     tokens to experts                               results to tokens
    | all-to-all   all-to-all of the tokens of each pair           all-to-all (GShard, arXiv 2006.16668, section 3)
    | all-gather   all-gather of tokens, choices and weights       reduce-scatter of the sums of each rank's experts"""

import math
from collections.abc import Callable
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
        experts, inner, tensor = (mesh.expand(axes) for axes in (["ep"], ["etp"], plan.tensor_axes))
        split = plan.sequence_parallel == 1
        copies = () if split else tuple(axis for axis in tensor if axis not in inner)
        return cls(experts, inner, copies, inner if split else (), mesh.others(("pp", "ep", "etp")))


Compute: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Function of rows (n, features) and the number (n,) of each row's local expert that returns results (n, features)."""
Routing: TypeAlias = tuple[Tensor, list[int], list[int], Tensor]
"""Routing of pairs in one dispatch.

    | order      numbers of the pairs that are kept, sorted by expert; pair p is choice p % k of token p // k
    | sent       rows sent to each rank; one number where no row moves
    | received   rows received from each rank
    | local      number among this rank's experts of each received row's expert"""


class _RoutedTokens(NamedTuple):
    """Tokens (n, features), and the chosen experts of each token and their weights, (n, k) each."""

    tokens: Tensor
    chosen: Tensor
    weights: Tensor


def gathers(plan: Plan, *, choices: int, experts: int) -> bool:
    """Return whether `plan` dispatches by all-gather, for `choices` of each token among `experts` experts.

    For each token of H features, the all-to-alls move 2 · choices · H (ep-1)/ep elements in a forward, and all-gather
    and reduce-scatter move 2 · H (ep-1). `auto` takes the fewer. A choice of all experts is a mask with drops: it takes
    the all-to-all."""
    return plan.dispatch == "all-gather" or (plan.dispatch == "auto" and 1 < plan.ep < choices < experts)


class ExpertExchange:
    """Exchange of one mixture on this rank; deep copies of its module share it."""

    def __init__(
        self, world: World, *, axes: ExpertAxes, plan: Plan, experts: int, recall: ForwardReplay, imbalance: float = 1.0
    ) -> None:
        """`experts`: number of experts over all ranks. `recall`: results that a repeated forward takes again.

        `imbalance`: without values, load of this rank's experts as a multiple of the even share."""
        self._imbalance = imbalance
        self._world = world
        self._axes = axes
        self._plan = plan
        self._experts = experts
        self._recall = recall
        self.shares = [stop - start for start, stop in even_split(experts, world.group(axes.experts).size)]
        """Number of experts of each rank along `ep`."""
        self.index = index = world.group(axes.experts).index
        """Index of this rank along `ep`."""
        self.span = sum(self.shares[:index]), sum(self.shares[: index + 1])
        """Numbers [start, stop) of this rank's experts."""
        self.load = torch.zeros(experts, dtype=torch.int64, device=world.device)
        """Pairs that this rank has sent to each expert, since `imbalances` last read them."""
        self.received = 0
        """Rows that this rank's experts got in the last dispatch."""
        self.even_share = 0.0
        """Rows that they would have got there from a balanced router without drops."""
        self.inner_ranks = world.group(axes.inner).size
        """Number of ranks that split each expert's matrices (`etp`)."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    def run(self, hidden: Tensor, *, index: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """Return the output of the mixture, of the shape of `hidden` (…, features).

        `index`, `weights`: expert and weight of each choice of each token, (tokens, k). `compute`: the local experts.
        """
        tokens, world = hidden.reshape(-1, hidden.size(-1)), self._world
        x = _RoutedTokens(tokens, index.reshape(len(tokens), -1), weights.reshape(len(tokens), -1))
        copies, parts = world.group(self._axes.copies), world.group(self._axes.parts)
        if copies.size > 1:
            bounds = even_split(len(tokens), copies.size)
            along: Any = {"world": world, "axes": copies.axes, "sizes": [stop - start for start, stop in bounds]}
            tokens, weights = (gradient.take(each, **along).wait() for each in (x.tokens, x.weights))
            mixed = self._in_chunks(_RoutedTokens(tokens, x.chosen[slice(*bounds[copies.index])], weights), compute)
            mixed = gradient.replicate(mixed, **along).wait()
        elif parts.size > 1:
            x, sizes = self._gathered(x, axes=parts.axes, collective=gradient.replicate)
            mixed = gradient.take(self._in_chunks(x, compute), world=world, axes=parts.axes, sizes=sizes).wait()
        else:
            mixed = self._in_chunks(x, compute)
        return mixed.reshape(hidden.shape)

    def _gathered(
        self, x: _RoutedTokens, *, axes: tuple[str, ...], collective: Callable[..., gradient.PendingResult]
    ) -> tuple[_RoutedTokens, list[int]]:
        """Return the tokens of all ranks along `axes`, gathered by `collective`, and how many each rank has."""
        world, sizes = self._world, self._world.exchange(len(x.tokens), axes=axes)
        gather = partial(collective, world=world, axes=axes, sizes=sizes)
        tokens, weights = (gather(each).wait() for each in (x.tokens, x.weights))
        index = x.chosen.new_empty(len(tokens), x.chosen.size(1))
        world.all_gather(x.chosen.contiguous(), into=list(index.split(sizes)), axes=axes).wait()
        return _RoutedTokens(tokens, index, weights), sizes

    def _in_chunks(self, x: _RoutedTokens, compute: Compute) -> Tensor:
        """Return the output for these tokens; with `chunk`, dispatch so many at a time.

        All ranks run as many chunks. A chunk keeps its tokens alone, and is dispatched again in the backward."""
        if not self._plan.chunk:
            return self._mixed(x, compute)
        parts, longest = [], max(self._world.exchange(len(x.tokens), axes=self._axes.experts))
        for start in range(0, max(1, longest), self._plan.chunk):
            own = _RoutedTokens(*(each[start : start + self._plan.chunk] for each in x))
            chunk = RecomputedBlock(_Chunk(self, compute), name="a chunk of tokens", mode="full", recall=self._recall)
            parts.append(chunk(*own))
        return torch.cat(parts)

    def _mixed(self, x: _RoutedTokens, compute: Compute) -> Tensor:
        """Return the output for these tokens, by one of the two dispatches."""
        if not gathers(self._plan, choices=x.chosen.size(1), experts=self._experts):
            return self._combined(x, compute, self._routed(x.chosen))
        axes = self._axes.experts
        everyone, sizes = self._gathered(x, axes=axes, collective=gradient.all_gather)
        mixed = self._combined(everyone, compute, self._own_pairs(x.chosen, everyone.chosen))
        return gradient.reduce_scatter(mixed, world=self._world, axes=axes, sizes=sizes).wait()

    def _combined(self, x: _RoutedTokens, compute: Compute, routing: Routing) -> Tensor:
        """Return the weighted sums of results of the pairs in `routing`: send the rows, compute, return the results."""
        order, sent, received, local = routing
        self.received, own = sum(received), self.span[1] - self.span[0]
        self.even_share = x.chosen.numel() * len(sent) * own / self._experts
        source = order // x.chosen.size(1)
        rows = self._moved(x.tokens[source], sent=sent, received=received)
        if torch.is_grad_enabled() and not rows.requires_grad:
            # Then every rank takes part in the backward of the return, also a rank whose experts get no row.
            rows = rows.detach().requires_grad_()
        results = self._computed(rows, local=local, compute=compute)
        results = self._moved(results, sent=received, received=sent)
        weighted: Tensor = results * x.weights.reshape(-1)[order].unsqueeze(-1)
        if len(order) == x.chosen.numel():  # nothing is dropped: a sum in a fixed order, also on CUDA
            mixed: Tensor = weighted[order.argsort()].unflatten(0, x.chosen.shape).sum(1)
        else:
            mixed = weighted.new_zeros(len(x.tokens), weighted.size(-1)).index_add(0, source, weighted)
        return mixed.to(x.tokens.dtype)

    def _computed(self, rows: Tensor, *, local: Tensor, compute: Compute) -> Tensor:
        """Return the results of this rank's experts in the dtype of `rows`, summed over the ranks of `etp`."""
        axes = self._axes.inner
        if self.inner_ranks == 1:
            results: Tensor = compute(rows, local)
            return results.to(rows.dtype)
        part = compute(gradient.copy(rows, world=self._world, axes=axes).wait(), local)
        return gradient.all_reduce(part, world=self._world, axes=axes).wait().to(rows.dtype)

    def _moved(self, rows: Tensor, *, sent: list[int], received: list[int]) -> Tensor:
        if len(sent) == 1:
            return rows
        return gradient.all_to_all(
            rows, world=self._world, axes=self._axes.experts, split_dim=0, cat_dim=0, sizes=(sent, received)
        ).wait()

    def _own_pairs(self, index: Tensor, choices: Tensor) -> Routing:
        """Return the routing to this rank's experts in `choices` of all ranks; `index`: choices of this rank."""
        own, pairs = self.span[1] - self.span[0], choices.numel()
        if index.is_meta:
            rows = min(pairs, math.ceil(pairs * own / self._experts * self._imbalance))
            return torch.arange(rows, device=index.device), [rows], [rows], choices.new_empty(rows)
        self.load += torch.bincount(index.reshape(-1), minlength=self._experts)[: self._experts]
        local = (choices - self.span[0]).reshape(-1)
        local = local.masked_fill((local < 0) | (local >= own), own)
        order = local.argsort(stable=True)[: int((local < own).sum())]
        return order, [len(order)], [len(order)], local[order]

    def _routed(self, index: Tensor) -> Routing:
        """Return the routing of this rank's pairs, after an exchange of counts; a repeated forward repeats it."""
        if index.is_meta:
            return self._balanced(index)
        order, counts, arriving = self._recall.once(lambda: self._counted(index))
        ranks, mine = len(self.shares), self.span[1] - self.span[0]
        sent = [int(part.sum()) for part in counts.cpu().split(self.shares)]
        numbers = torch.arange(mine, device=index.device).repeat(ranks)
        local = numbers.repeat_interleave(arriving)
        received = arriving.cpu().view(ranks, mine).sum(1).tolist()
        return order, sent, received, local

    def _counted(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the kept pairs sorted by expert, the pairs for each expert, and the rows from each rank to each expert
        of this rank, rank by rank."""
        chosen = index.reshape(-1)
        counts = torch.bincount(chosen, minlength=self._experts)[: self._experts]
        order = chosen.argsort(stable=True)[: int(counts.sum())]
        self.load += counts
        return order, counts, self._exchange_counts(counts)

    def _balanced(self, index: Tensor) -> Routing:
        """Return a routing without values, as of a router that gives equally many pairs to the experts of each rank.

        This rank receives `imbalance` times as many, at most all."""
        group, pairs = self._world.group(self._axes.experts), index.numel()
        share = (self.span[1] - self.span[0]) / self._experts if group.size > 1 else 1.0
        mine = min(pairs, math.ceil(pairs * share * self._imbalance))
        sent = [stop - start for start, stop in even_split(pairs - mine, max(1, group.size - 1))][: group.size - 1]
        sent.insert(group.index, mine)
        received = [mine] * group.size
        self._exchange_counts(index.new_empty(self._experts))
        order = torch.arange(index.numel(), device=index.device)
        return order, sent, received, index.new_empty(sum(received))

    def _exchange_counts(self, counts: Tensor) -> Tensor:
        """Send each rank its part of `counts` (experts,); return the received counts (ranks · own experts,)."""
        mine = self.span[1] - self.span[0]
        arriving = counts.new_empty(len(self.shares) * mine)
        parts = [part.contiguous() for part in counts.split(self.shares)]
        self._world.all_to_all(parts, into=list(arriving.split(mine)), axes=self._axes.experts).wait()
        return arriving


class _Chunk(nn.Module):
    """Dispatch of some of this rank's tokens, as a module that is recomputed in the backward."""

    def __init__(self, exchange: ExpertExchange, compute: Compute) -> None:
        super().__init__()
        self.exchange, self.compute = exchange, compute

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the output for these tokens."""
        return self.exchange._mixed(_RoutedTokens(tokens, index, weights), self.compute)
