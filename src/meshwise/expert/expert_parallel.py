"""Divide the experts of a plain model over ranks: each rank's mixtures hold and run only its local experts.

`token_exchange.py` sends each token to the ranks of its experts, and back. Under `etp` the matrices of
stacked experts are split, the first by columns, the last by rows. n is 2 for experts with gate and value, else 1:

    | first   (experts, n · inner, features)   split in each of n sections, or in groups if they alternate
    | last    (experts, features, inner)       split in `inner`; the results are summed over the ranks

The bias (experts, n · inner) is split like the first matrix. The bias (experts, features) is whole. Both matrices may
also be stored as (experts, inputs, outputs).

PEFT's `target_parameters` wraps a module of stacked experts. It has matrices of LoRA rank r for all E experts:

    | lora_A   (E · r, inputs)    all rows of the first expert, then of the second
    | lora_B   (outputs, r · E)   the first column of every expert, then the second"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import all_tensors, map_tensors
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.expert.token_exchange import Compute, ExpertAxes, ExpertExchange, LocalExperts
from meshwise.layout.layout import ANYWHERE, DimSplit, Layout
from meshwise.model.find_mixtures import Mixture, compute_experts
from meshwise.model.forward import ForwardReplay
from meshwise.model.module_copy import set_sharded_class
from meshwise.model.parameter_table import Placement
from meshwise.plan import Plan, PlanError

WIDTHS = ("intermediate_dim", "intermediate_size", "moe_intermediate_size", "expert_dim", "hidden", "inner")
"""Names of the attribute that holds the inner size of an expert."""


@dataclass(frozen=True)
class InnerSplit:
    """How the parameters of stacked experts are split over `etp`.

    | cuts     dim that is split, and how, by name of the parameter; other parameters stay whole
    | bias     name of the bias that is added to the results; "" for none
    | inner    inner size over all ranks"""

    cuts: Mapping[str, tuple[int, DimSplit]]
    bias: str
    inner: int


def inner_split(experts: nn.Module, *, mixture: Mixture, name: str) -> InnerSplit:
    """Return how the experts of a module called `name` are split over `etp`.

    Raises PlanError for experts that are not two matrices, or if the sizes do not show which dim is the inner one."""
    own = dict(experts.named_parameters(recurse=False))
    matrices = {key: each for key, each in own.items() if each.dim() == 3}
    if mixture.form == "called" or len(own) < sum(1 for _ in experts.parameters()) or len(matrices) != 2:
        raise PlanError(
            f"{name} ({type(experts).__name__}) has other parameters than two matrices for each expert, so etp cannot "
            "split it. Nearest that works: 'etp=1'"
        )
    (first_name, first), (last_name, last) = matrices.items()
    stored = {
        flipped: (first.size(1 + flipped), last.size(2 - flipped))
        for flipped in (False, True)
        if first.size(2 - flipped) == last.size(1 + flipped) and first.size(1 + flipped) % last.size(2 - flipped) == 0
    }
    declared = vars(experts).get("is_transposed")
    flipped = declared if declared in stored or len(stored) != 1 else next(iter(stored))
    if flipped not in stored:
        raise PlanError(
            f"{name}: matrices of {tuple(first.shape)} and {tuple(last.shape)} do not show which dim is the inner one. "
            "State it by an attribute of the module, is_transposed: True for (experts, inputs, outputs). Nearest that "
            "works as it is: 'etp=1'"
        )
    outputs, inner = stored[flipped]
    number = outputs // inner
    together = vars(experts).get("is_concatenated", True)
    cut = ANYWHERE if number == 1 else DimSplit((inner,) * number) if together else DimSplit(grain=number)
    cuts = {first_name: (1 + flipped, cut), last_name: (2 - flipped, ANYWHERE)}
    biases = [key for key, each in own.items() if each.dim() == 2]
    cuts |= {key: (1, cut) for key in biases if key.startswith(first_name)}
    rest = [key for key in biases if key not in cuts]
    if len(rest) > 1 or len(own) != len(cuts) + len(rest):
        raise PlanError(f"{name} has parameters that etp cannot split: {', '.join(rest)}. Nearest that works: 'etp=1'")
    return InnerSplit(cuts, next(iter(rest), ""), inner)


@dataclass(frozen=True)
class SplitMixture:
    """Mixture on this rank, and its exchange of tokens."""

    mixture: Mixture
    exchange: ExpertExchange
    inner: InnerSplit | None = None
    """Split of the experts' matrices over `etp`; None without `etp`."""


class SplitExperts(nn.Module):
    """Base class placed before a module's own class: it exchanges tokens around the forward of stacked experts."""

    sharding: SplitMixture

    @gradient.uncompiled
    def forward(self, hidden: Tensor, *rest: Any, **named: Any) -> Tensor:
        """Return the mixture's output for this rank's tokens. Arguments: as of the module's own forward."""
        own: Callable[..., Tensor] = super().forward
        if self.sharding.mixture.form == "rows":
            return self._rows(hidden, own=own)
        given = (*rest, *named.values())
        index = next(each for each in given if isinstance(each, Tensor) and not each.is_floating_point())
        weights = next(each for each in given if isinstance(each, Tensor) and each.is_floating_point())

        def compute(rows: Tensor, local: Tensor) -> Tensor:
            chosen, ones = local.unsqueeze(-1), weights.new_ones(len(rows), 1)
            swap = lambda each: chosen if each is index else ones if each is weights else each  # noqa: E731
            return own(rows, *map(swap, rest), **{key: swap(each) for key, each in named.items()})

        return self.sharding.exchange.run(hidden, index=index, weights=weights, experts=self._local(compute))

    def _rows(self, hidden: Tensor, *, own: Callable[..., Tensor]) -> Tensor:
        """Return the results of rows (experts · n, features), all rows for the first expert, then for the second.

        Rows of zeros stay here: their result is 0, because experts in this form have no biases."""
        experts = self.sharding.mixture.experts
        numbers = torch.arange(experts, device=hidden.device).repeat_interleave(len(hidden) // experts)
        index = numbers.masked_fill((hidden == 0).all(-1), experts)

        def compute(rows: Tensor, local: Tensor) -> Tensor:
            number = vars(self)[self.sharding.mixture.counts[0]]
            counts = local.new_empty(number) if local.is_meta else torch.bincount(local, minlength=number)
            most = math.ceil(len(rows) / number) if local.is_meta else int(counts.max())
            order = local.argsort(stable=True)
            place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[local[order]]
            slots = torch.empty_like(local).index_copy(0, order, place) + local * most
            padded = rows.new_zeros(number * most, rows.size(-1)).index_copy(0, slots, rows)
            return own(padded)[slots]

        ones = hidden.new_ones(len(hidden), 1)
        return self.sharding.exchange.run(hidden, index=index.unsqueeze(-1), weights=ones, experts=self._local(compute))

    def _local(self, compute: Compute) -> LocalExperts:
        """Return `compute` for any number of rows, by this rank's experts and by copies of other experts."""

        def computed(rows: Tensor, local: Tensor) -> Tensor:
            if not len(rows):
                return _idle(rows, experts=self)
            results = compute(rows, local)
            if self.sharding.inner and self.sharding.inner.bias:
                # Every rank of etp has added the whole bias, and the results will be summed over these ranks.
                bias, parts = getattr(self, self.sharding.inner.bias), self.sharding.exchange.inner_ranks
                results = results - bias[local] * (1 - 1 / parts)
            return results

        def copied(gather: Callable[[Tensor], gradient.PendingResult]) -> Compute:
            pending = {key: gather(each) for key, each in self._parameters.items() if each is not None}

            def compute_copies(rows: Tensor, local: Tensor) -> Tensor:
                own, counts = dict(self._parameters), {key: vars(self)[key] for key in self.sharding.mixture.counts}
                copies = {key: each.wait() for key, each in pending.items()}
                # On every rank, each copy takes part in the backward, which is a collective.
                none = torch.stack([each.flatten()[:0].sum() for each in copies.values()]).sum()
                try:
                    self._parameters.update(copies)  # type: ignore[arg-type]
                    vars(self).update(dict.fromkeys(counts, self.sharding.exchange.copies))
                    return computed(rows, local) + none
                finally:
                    self._parameters.update(own)
                    vars(self).update(counts)

            return compute_copies

        return LocalExperts(computed, copied)


def _idle(rows: Tensor, *, experts: nn.Module) -> Tensor:
    """Return `rows`, an empty tensor, in a graph that gives each parameter of `experts` a gradient of zeros.

    So the reductions of gradients start at the same place of the backward on every rank."""
    parametrized = experts._modules.get("parametrizations")  # by PEFT, around the call of the experts
    adapted = [getattr(experts, key) for key, _ in parametrized.named_children()] if parametrized else []
    return rows + torch.stack([each.flatten()[:0].sum() for each in (*experts.parameters(), *adapted)]).sum()


class ExpertCalls:
    """Calls of one mixture's experts by the module around them; deep copies of the modules share this object.

    | recorded   in the first run of the module: number of the expert and rows (…, features) of each call; else None
    | results    in the second run: results of the calls still to come, in reverse order; else None"""

    def __init__(self, experts: Sequence[nn.Module], *, exchange: ExpertExchange, recall: ForwardReplay) -> None:
        """`experts`: of all ranks; this rank runs the experts of its span."""
        self.exchange, self.recall = exchange, recall
        self.recorded: list[tuple[int, Tensor]] | None = None
        self.results: list[Tensor] | None = None
        self.load = torch.zeros(len(experts), dtype=torch.int64, device=exchange.world.device)
        """Rows for each expert since `imbalances` last read them."""
        self._own = experts[slice(*exchange.span)]

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    def compute(self, recorded: Sequence[tuple[int, Tensor]], *, like: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Exchange the recorded rows between ranks; return all results as one tensor (n, features), and one per call.

        `like` (…, features): a tensor with the dtype of rows, for a rank without calls."""
        flat = [x.reshape(-1, x.size(-1)) for _, x in recorded] or [like.reshape(-1, like.size(-1))[:0]]
        rows, sizes = torch.cat(flat), [len(x) for x in flat]
        numbers = [number for number, _ in recorded] or [0]
        index = torch.cat(
            [rows.new_full((size, 1), n, dtype=torch.int64) for n, size in zip(numbers, sizes, strict=True)]
        )
        self.load.index_add_(0, index.flatten(), torch.ones_like(index).flatten())

        def computed(rows: Tensor, local: Tensor) -> Tensor:
            order, counts = local.argsort(stable=True), torch.bincount(local, minlength=len(self._own)).tolist()
            parts = zip(self._own, rows[order].split(counts), strict=True)
            results = [expert(part) if len(part) else _idle(part, experts=expert) for expert, part in parts]
            return torch.cat(results)[order.argsort()]

        weights = rows.new_ones(len(rows), 1)
        results = self.exchange.run(rows, index=index, weights=weights, experts=LocalExperts(computed))
        return results, [part.view(x.shape) for part, (_, x) in zip(results.split(sizes), recorded, strict=False)]

    def call(self, rows: Tensor, *, number: int, own: Callable[[Tensor], Tensor]) -> Tensor:
        """Record a call of expert `number`, or return its result; outside of both runs call its forward, `own`.

        Raises ValueError if the second run of the module around calls the experts with other rows."""
        if self.recorded is not None:
            self.recorded.append((number, rows))
            return torch.full_like(rows, math.nan)  # so rows that depend on results are not finite
        if self.results is None:
            return own(rows)
        result = self.results.pop() if self.results else rows[:0]
        if result.shape != rows.shape:
            raise ValueError(
                f"expert {number} got rows {tuple(rows.shape)} in the second run of the module that calls it, and "
                f"{tuple(result.shape)} in the first. Let the module give the same rows whatever its experts return, "
                "or leave out the rule 'experts' and use ep=1"
            )
        return result


class CalledExpert(nn.Module):
    """Base class placed before the own class of an expert that a `CallingModule` calls."""

    sharding: tuple[ExpertCalls, int]

    @gradient.uncompiled
    def forward(self, *rows: Tensor, **named: Any) -> Tensor:
        """Return the expert's results for `rows` (…, features), whichever rank computes them; NaN in the first run."""
        calls, number = self.sharding
        if len(rows) != 1 or named:
            raise ValueError(
                f"expert {number} is called with {len(rows)} positional arguments and {list(named)}, and the rule "
                "'experts' divides experts of one tensor (…, features). Leave out the rule and use ep=1"
            )
        return calls.call(*rows, number=number, own=super().forward)


class CallingModule(nn.Module):
    """Base class placed before the own class of a module that calls experts one by one; runs its forward twice.

    In the first run each call records its rows, in the second it returns its results (docs/experts.md). Both have the
    same random draws. Gradients of the rows flow through the first run, all others through the second."""

    sharding: ExpertCalls

    @gradient.uncompiled
    def forward(self, *given: Any, **named: Any) -> Any:
        """Return the output of the module's own forward."""
        run, calls = functools.partial(super().forward, *given, **named), self.sharding
        place, recorded = calls.recall.snapshot(), list[tuple[int, Tensor]]()
        try:
            calls.recorded = recorded
            run()
            calls.recorded = None
            results, parts = calls.compute(recorded, like=next(iter(all_tensors((given, named)))))
            calls.results = parts[::-1]
            with calls.recall.restored(place):
                output = run()
        finally:
            calls.recorded = calls.results = None
        # Every rank takes part in the backward of the exchange, also a rank that called no expert.
        none = results.flatten()[:0].sum()
        return map_tensors(lambda x: x + none.to(x.dtype) if x.is_floating_point() else x, output)


def expert_parallel(
    module: nn.Module,
    *,
    mixtures: Mapping[str, Mixture],
    world: World,
    plan: Plan,
    recall: ForwardReplay,
    imbalance: float = 1.0,
) -> Mapping[str, Placement]:
    """Split the mixtures of a model in place, and return the placements of their parameters, by name.

    The mixtures get a class that exchanges tokens, and attributes with this rank's number of experts. Their parameters
    stay full; the caller replaces them by this rank's parts. `recall`, `imbalance`: as in `ExpertExchange`."""
    placed: dict[str, Placement] = {}
    modules = dict(module.named_modules())
    axes = ExpertAxes.of(world, plan=plan)
    for name, mixture in mixtures.items():
        experts = modules[name]
        if not any(True for _ in experts.parameters()):
            continue
        exchange = ExpertExchange(
            world, axes=axes, plan=plan, experts=mixture.experts, recall=recall, imbalance=imbalance
        )
        if mixture.form == "rows":
            exchange.kept = vars(modules[name.rpartition(".")[0]]).get("top_k", 1) / mixture.experts
        inner = inner_split(experts, mixture=mixture, name=name) if exchange.inner_ranks > 1 else None
        if inner is not None:
            [size] = Layout((axes.inner,)).local_shape((inner.inner,), mesh=world.mesh, rank=world.rank)
            if world.device.type != "meta":  # a loop over experts reads values
                _loop_if_narrow(experts, size=size, etp=plan.etp)
        if mixture.form == "called":
            each_expert = {key: each for key, each in experts.named_children() if any(True for _ in each.parameters())}
            calls = ExpertCalls(list(each_expert.values()), exchange=exchange, recall=recall)
            listed = type(experts).forward is nn.ModuleList.forward
            caller = modules[name.rpartition(".")[0]] if listed else experts
            set_sharded_class(caller, front=CallingModule, sharding=calls)
            for number, (child, expert) in enumerate(each_expert.items()):
                set_sharded_class(expert, front=CalledExpert, sharding=(calls, number))
                placed |= _called_placed(expert, f"{name}.{child}", number=number, exchange=exchange, axes=axes)
            continue
        set_sharded_class(experts, front=SplitExperts, sharding=SplitMixture(mixture, exchange, inner))
        placed |= _stacked_placed(experts, name, inner=inner, axes=axes)
        placed |= _adapters_placed(modules, name=name, exchange=exchange, axes=axes)
        for key in mixture.counts:
            setattr(experts, key, exchange.shares[exchange.index])
        if inner is not None:
            for key in WIDTHS:
                if vars(experts).get(key) == inner.inner:
                    setattr(experts, key, size)
    return placed


def _loop_if_narrow(experts: nn.Module, *, size: int, etp: int) -> None:
    """Compute experts of transformers one after the other if grouped products cannot take rows of `size` features."""
    dtype = next(experts.parameters()).dtype
    way = getattr(vars(experts).get("config"), "_experts_implementation", "")
    if way == "grouped_mm" and size * dtype.itemsize % 16:
        compute_experts(experts, by="eager")
        warnings.warn(
            f"etp={etp} leaves {type(experts).__name__} an inner size of {size} in {str(dtype)[6:]}, and grouped "
            "products need rows of a multiple of 16 bytes. So the experts are computed in a loop, which is slower. "
            f"Choose an inner size that is a multiple of {16 // dtype.itemsize} * etp",
            stacklevel=2,
        )


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


def _adapters_placed(
    modules: Mapping[str, nn.Module], *, name: str, exchange: ExpertExchange, axes: ExpertAxes
) -> dict[str, Placement]:
    """Return the placements of the adapters around the experts called `name`, and set the wrappers' count of experts.

    Raises PlanError under `etp`, and where PEFT cannot compute one expert alone."""
    placed, shares, index = dict[str, Placement](), exchange.shares, exchange.index
    experts, why = sum(shares), "etp splits no adapters of experts; use etp=1" if exchange.inner_ranks > 1 else ""
    why = "copies of experts have no adapters; use replicate=0" if exchange.copies else why
    if experts > min(shares) == 1 and vars(modules[name]).get("is_transposed"):
        why = f"with is_transposed, PEFT needs two or more experts on each rank; use 'ep={experts // 2}'"
    if why and name.endswith(".base_layer"):
        raise PlanError(f"PEFT adapter of {name.partition('.base_layer')[0]!r}: {why}")
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
        for kind in ("lora_A", "lora_B"):
            for adapter, matrix in modules[name].get_submodule(kind).named_children():
                rows = kind == "lora_A"
                rank = matrix.get_parameter("weight").size(0 if rows else 1) // experts
                cut = DimSplit(grain=rank) if rows else DimSplit((experts,) * rank)
                splits, cuts = ((axes.experts, ()), (cut, ANYWHERE)) if rows else (((), axes.experts), (ANYWHERE, cut))
                placed[f"{name}.{kind}.{adapter}.weight"] = Placement(Layout(splits, cuts=cuts), axes.summed)
        vars(modules[name])["num_experts"] = shares[index]
    return placed


def _called_placed(
    expert: nn.Module, name: str, *, number: int, exchange: ExpertExchange, axes: ExpertAxes
) -> Mapping[str, Placement]:
    """Return the placements of an expert that is a module: whole, on the ranks of the expert alone."""
    owner = [rank for rank, size in enumerate(exchange.shares) for _ in range(size)][number]
    held_at = (("ep", owner),) if len(exchange.shares) > 1 else ()
    return {
        key: Placement(Layout.replicated(parameter.dim()), axes.summed, held_at)
        for key, parameter in expert.named_parameters(prefix=name)
    }


def imbalances(modules: Sequence[nn.Module], *, counted: Mapping[str, Tensor], world: World) -> Mapping[str, float]:
    """Return the load of the busiest expert over the mean load, by name of the mixture, and forget the loads.

    Every rank calls it. The loads are of all forwards since the last call: those in `counted`, and of experts that
    other modules call. Mixtures that no rank has run are left out."""
    called = {name: each.sharding.load for name, each in _divided(modules) if isinstance(each, CallingModule)}
    loads = take_counts({**counted, **called}, world=world)
    return {name: max(load) / (sum(load) / len(load)) for name, load in loads.items() if sum(load)}


def take_counts(counts: Mapping[str, Tensor], *, world: World, copies: Sequence[str] = ()) -> dict[str, list[int]]:
    """Return the sums of each mixture's counts over the ranks, and set them to 0. Every rank calls it.

    `copies`: axes whose ranks have counted the same tokens, which are added once."""
    found = {}
    for name, each in counts.items():
        total = each.clone()
        each.zero_()
        world.all_reduce(total, axes=world.mesh.others(("pp", *copies))).wait()
        found[name] = total.tolist()
    return {name: each for stage in world.exchange(found, axes="pp") for name, each in stage.items()}


def fullest_mixture(modules: Sequence[nn.Module]) -> str:
    """Return a sentence on the mixture whose experts got the most rows on this rank; "" if none got rows."""
    exchanges = ((name, each.sharding.exchange) for name, each in _divided(modules))
    name, most = max(exchanges, key=lambda each: each[1].received, default=("", None))
    if most is None or not most.received:
        return ""
    return (
        f"The experts of this rank in {name} got {most.received} rows at once, {most.received / most.even_share:.2f} "
        "times an even share. With chunk=1024 in the plan they get the rows of fewer tokens at once."
    )


def _divided(modules: Sequence[nn.Module]) -> Iterator[tuple[str, SplitExperts | CallingModule]]:
    """Return the name and the module of each mixture whose experts are divided."""
    pairs = (pair for module in modules for pair in module.named_modules())
    return ((name, each) for name, each in pairs if isinstance(each, SplitExperts | CallingModule))
