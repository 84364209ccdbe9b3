"""Exchange tokens between ranks for a mixture of experts: each token goes to the ranks of its experts, and back.

A mixture computes `y[t] = sum over k of weights[t, k] * expert[index[t, k]](x[t])`. Its router has already chosen
`index` and `weights`, each (tokens, k). docs/experts.md has the steps and what a rank sends. A pair is a token and one
of its choices; a pair with an index past the last expert is dropped. The ranks of tp have equal tokens: each takes a
part of them before, and gathers all tokens after. Under `etp`, an all-reduce sums the results of the experts. No token
is dropped, as in MegaBlocks (Gale et al., arXiv 2211.15841, section 4). GShard has the two all-to-alls (Lepikhin et
al., arXiv 2006.16668, section 3)."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from meshwise.base.mesh import even_split
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.model.forward_replay import ForwardReplay
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


@dataclass(frozen=True)
class _Routing:
    """Pairs of this rank that are sent, and rows that arrive.

    | order      numbers of the pairs that are kept, sorted by expert; pair p is choice p % k of token p // k
    | sent       rows sent to each rank
    | received   rows received from each rank
    | local      number among this rank's experts of each received row's expert"""

    order: Tensor
    sent: list[int]
    received: list[int]
    local: Tensor


class ExpertExchange:
    """Exchange of one mixture on this rank; deep copies of its module share it."""

    def __init__(self, world: World, *, axes: ExpertAxes, experts: int, recall: ForwardReplay) -> None:
        """`experts`: number of experts over all ranks. `recall`: results that a repeated forward takes again."""
        self._world = world
        self._axes = axes
        self._experts = experts
        self._recall = recall
        self.shares = [stop - start for start, stop in even_split(experts, world.group(axes.experts).size)]
        """Number of experts of each rank along `ep`."""
        index = world.group(axes.experts).index
        self.span = sum(self.shares[:index]), sum(self.shares[: index + 1])
        """Numbers [start, stop) of this rank's experts."""
        self.load = torch.zeros(experts, dtype=torch.int64, device=world.device)
        """Pairs that this rank has sent to each expert, since `imbalances` last read them."""
        self.inner_ranks = world.group(axes.inner).size
        """Number of ranks that split each expert's matrices (`etp`)."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    def run(self, hidden: Tensor, *, index: Tensor, weights: Tensor, compute: Callable[..., Tensor]) -> Tensor:
        """Return the output of the mixture, of the shape of `hidden` (…, features).

        `index`, `weights`: expert and weight of each choice of each token, (tokens, k). `compute(rows, local)` returns
        the results (n, features) of rows (n, features) for the local experts numbered by `local` (n,)."""
        tokens = hidden.reshape(-1, hidden.size(-1))
        index, weights = index.reshape(len(tokens), -1), weights.reshape(len(tokens), -1)
        copies, sizes = self._world.group(self._axes.copies), None
        if copies.size > 1:
            bounds = even_split(len(tokens), copies.size)
            sizes = [stop - start for start, stop in bounds]
            index = index[slice(*bounds[copies.index])]
            tokens, weights = (
                gradient.take(x, world=self._world, axes=copies.axes, sizes=sizes).wait() for x in (tokens, weights)
            )
        elif self._world.group(self._axes.parts).size > 1:
            return self._joined(tokens, index=index, weights=weights, compute=compute).reshape(hidden.shape)
        mixed = self._mixed(tokens, index=index, weights=weights, compute=compute)
        if sizes is not None:
            mixed = gradient.replicate(mixed, world=self._world, axes=copies.axes, sizes=sizes).wait()
        return mixed.reshape(hidden.shape)

    def _joined(self, tokens: Tensor, *, index: Tensor, weights: Tensor, compute: Callable[..., Tensor]) -> Tensor:
        """Return the output for this rank's tokens, computed with the tokens of all ranks along `parts`."""
        world, group = self._world, self._world.group(self._axes.parts)
        sizes = world.exchange(len(tokens), axes=group.axes)
        tokens, weights = (
            gradient.replicate(x, world=world, axes=group.axes, sizes=sizes).wait() for x in (tokens, weights)
        )
        choices = index.new_empty(len(tokens), index.size(1))
        world.all_gather(index.contiguous(), into=list(choices.split(sizes)), axes=group.axes).wait()
        mixed = self._mixed(tokens, index=choices, weights=weights, compute=compute)
        return gradient.take(mixed, world=world, axes=group.axes, sizes=sizes).wait()

    def _mixed(self, tokens: Tensor, *, index: Tensor, weights: Tensor, compute: Callable[..., Tensor]) -> Tensor:
        """Return the output for this rank's tokens: sort the pairs, send them, compute, return and sum the results."""
        routing, choices = self._routed(index), index.size(1)
        rows = self._moved(tokens[routing.order // choices], sent=routing.sent, received=routing.received)
        if torch.is_grad_enabled() and not rows.requires_grad:
            # Then every rank takes part in the backward of the return, also a rank whose experts get no row.
            rows = rows.detach().requires_grad_()
        results = self._computed(rows, local=routing.local, compute=compute)
        results = self._moved(results, sent=routing.received, received=routing.sent)
        weighted: Tensor = results * weights.reshape(-1)[routing.order].unsqueeze(-1)
        if len(routing.order) == index.numel():  # nothing is dropped: a sum in a fixed order, also on CUDA
            mixed: Tensor = weighted[routing.order.argsort()].unflatten(0, index.shape).sum(1)
        else:
            mixed = weighted.new_zeros(len(tokens), weighted.size(-1)).index_add(0, routing.order // choices, weighted)
        return mixed.to(tokens.dtype)

    def _computed(self, rows: Tensor, *, local: Tensor, compute: Callable[..., Tensor]) -> Tensor:
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

    def _routed(self, index: Tensor) -> _Routing:
        """Return the routing of this rank's pairs, after an exchange of counts; a repeated forward repeats it."""
        if index.is_meta:
            return self._balanced(index)
        order, counts, arriving = self._recall.once(lambda: self._counted(index))
        ranks, mine = len(self.shares), self.span[1] - self.span[0]
        sent = [int(part.sum()) for part in counts.cpu().split(self.shares)]
        numbers = torch.arange(mine, device=index.device).repeat(ranks)
        local = numbers.repeat_interleave(arriving)
        received = arriving.cpu().view(ranks, mine).sum(1).tolist()
        return _Routing(order, sent, received, local)

    def _counted(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the kept pairs sorted by expert, the pairs for each expert, and the rows from each rank to each expert
        of this rank, rank by rank."""
        chosen = index.reshape(-1)
        counts = torch.bincount(chosen, minlength=self._experts)[: self._experts]
        order = chosen.argsort(stable=True)
        if bool(chosen.numel()) and int(chosen.max()) >= self._experts:
            order = order[: int(counts.sum())]
        self.load += counts
        return order, counts, self._exchange_counts(counts)

    def _balanced(self, index: Tensor) -> _Routing:
        """Return a routing without values, as of a router that gives every expert equally many pairs."""
        numbers = [stop - start for start, stop in even_split(index.numel(), self._experts)]
        starts = [0, *itertools.accumulate(self.shares)]
        sent = [sum(numbers[start:stop]) for start, stop in itertools.pairwise(starts)]
        received = [sent[self._world.group(self._axes.experts).index]] * len(sent)
        self._exchange_counts(index.new_empty(self._experts))
        order = torch.arange(index.numel(), device=index.device)
        return _Routing(order, sent, received, index.new_empty(sum(received)))

    def _exchange_counts(self, counts: Tensor) -> Tensor:
        """Send each rank its part of `counts` (experts,); return the received counts (ranks · own experts,)."""
        mine = self.span[1] - self.span[0]
        arriving = counts.new_empty(len(self.shares) * mine)
        parts = [part.contiguous() for part in counts.split(self.shares)]
        self._world.all_to_all(parts, into=list(arriving.split(mine)), axes=self._axes.experts).wait()
        return arriving
