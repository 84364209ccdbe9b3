"""The table of plans that are refused: combinations of keys, each with the reason and the nearest plan that works."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import eq, ge, gt, ne
from typing import Any

from meshwise.plan.plan_keys import WIRE_DTYPES, keys_of


@dataclass(frozen=True)
class Refusal:
    """Row of the compatibility table, in the notation of plans.

    | when      conditions: a plan that meets all of them is refused, as in `pp>1 zero>=2` or `offload.params!=device`
    | instead   the change that leads to the nearest plan that works, such as `tp_mode=1d`
    | reason    why such a plan cannot work"""

    when: str
    instead: str
    reason: str

    def applies(self, plan: Any) -> bool:
        """Return whether `plan` meets every condition. A degree of None (`auto`) meets no condition."""
        keys = keys_of(plan.__class__)
        for key, part, holds, bound in _conditions(self.when):
            value, parse = getattr(plan, key), keys[key].parse
            if part and parse is not None:
                value = getattr(parse(value), part)
            if value is None or not holds(value, bound if keys[key].words else int(bound)):
                return False
        return True

    def changes(self, plan: Any) -> dict[str, int | str]:
        """Return the key that `instead` changes, with its new value. `plan`: its class has the type of the key."""
        key, value = self.instead.split("=")
        return {key: value if keys_of(plan.__class__)[key].words else int(value)}


@cache
def _conditions(when: str) -> Sequence[tuple[str, str, Callable[[Any, Any], bool], str]]:
    """Return each condition as (key, part of its value, comparison, bound)."""
    comparisons: Mapping[str, Callable[[Any, Any], bool]] = {">": gt, ">=": ge, "=": eq, "!=": ne}
    found = []
    for condition in when.split():
        key, sign, bound = re.split(r"(>=|!=|>|=)", condition)
        key, _, part = key.partition(".")
        found.append((key, part, comparisons[sign], bound))
    return tuple(found)


COMPATIBILITY = (
    Refusal("sync!=step shards>0", "shards=0", "replicas that differ between agreements cannot share their state"),
    Refusal("server>0 shards>0", "shards=0", "workers hold the whole parameters"),
    Refusal("sync!=step offload.params!=device", "offload=none", "replicas agree about state on the device"),
    Refusal("server>0 offload.params!=device", "offload=none", "workers hold the whole parameters"),
    Refusal("tp_mode!=1d sequence_parallel>0", "sequence_parallel=0", "2d, 2.5d and 3d split every activation already"),
    Refusal("tp_mode!=2.5d tp_depth>1", "tp_depth=1", "only 2.5d has a depth"),
    Refusal("pp=1 schedule!=1f1b", "schedule=1f1b", "only a pipeline has a schedule"),
    Refusal("pp=1 virtual_stages>1", "virtual_stages=1", "only a pipeline has stages"),
    Refusal("zero!=3 offload.params!=device", "zero=3", "only zero=3 gathers parameters for each use"),
    Refusal("zero=0 shards>0", "zero=1", "without zero, no state is divided into shards"),
    Refusal("shards>0 wire.codec=powersgd", "shards=0", "replicas sum shards, and PowerSGD needs whole matrices"),
    Refusal("zero!=3 gather!=exact", "gather=exact", "only zero=3 gathers parameters for each use"),
    Refusal("zero!=3 hpz>1", "hpz=1", "only zero=3 gathers parameters for each use"),
    Refusal("zero!=3 prefetch!=1", "prefetch=1", "only zero=3 gathers parameters for each use"),
    Refusal("zero=3 pp>1 prefetch!=1", "prefetch=1", "the schedule of a pipeline gathers whole stages"),
    Refusal("zero=0 overlap_gather>0", "overlap_gather=0", "without zero, every rank updates all its parameters"),
    Refusal("zero=3 overlap_gather>0", "overlap_gather=0", "zero=3 gathers parameters for each use"),
    Refusal("hpz>1 offload.params!=device", "hpz=1", "the second copy would take the memory that offload saves"),
    Refusal("precision=fp16 wire.codec!=none", "precision=bf16", "a codec's kept error would have an old loss scale"),
    Refusal("cp=1 context!=auto", "context=auto", "only cp splits tokens"),
    Refusal("context!=usp cp_heads>1", "cp_heads=1", "only usp has two kinds of cp ranks"),
    Refusal("cp>1 tp_mode!=1d", "tp_mode=1d", "2d, 2.5d and 3d split rows, and cp has 1d matrices only"),
    Refusal("tp_mode!=1d ep>1", "ep=1", "the grids of 2d, 2.5d and 3d split the hidden states that experts need whole"),
    Refusal("tp_mode!=1d etp>1", "etp=1", "only 1d splits the matrices of experts"),
    Refusal("ep=1 dispatch!=auto", "dispatch=auto", "only ep moves tokens to experts"),
    Refusal("ep=1 chunk>0", "chunk=0", "only ep moves tokens to experts"),
    Refusal("ep=1 dispatch_parts>1", "dispatch_parts=1", "only ep moves tokens to experts"),
    Refusal("ep=1 replicate>0", "replicate=0", "only ep moves tokens to experts"),
    Refusal("ep>1 dispatch=all-gather dispatch_parts>1", "dispatch_parts=1", "all-gather moves all tokens at once"),
    Refusal("ep>1 dispatch=all-gather replicate>0", "replicate=0", "all-gather moves the tokens of all experts"),
    Refusal("compile=blocks recompute=selective", "recompute=full", "a compiled block does not show single operations"),
    Refusal("compile=blocks budget>0", "budget=0", "a compiled block does not show single operations"),
    Refusal("compile=blocks cp>1", "compile=off", "the attention calls collectives that torch.compile cannot trace"),
    Refusal("server>0 sync!=step", "server=0", "replicas that differ between agreements have optimizers of their own"),
    Refusal("sync=step every>1", "every=1", "sync=step agrees in each step"),
    Refusal("sync!=step zero>0", "zero=0", "replicas that differ between agreements cannot share their state"),
    Refusal("sync!=step ep>1", "ep=1", "experts that are divided over replicas are used in each step"),
    Refusal("sync!=step precision=fp16", "precision=bf16", "each replica would have its own loss scale"),
    *(Refusal(f"sync!=step wire={dtype}", "wire=auto", "masters travel in their dtype") for dtype in WIRE_DTYPES[1:]),
    Refusal("sync!=step wire.codec=powersgd", "wire=int8", "replicas sum flat tensors, PowerSGD needs whole matrices"),
    Refusal("sync=gossip wire.codec!=none", "wire=auto", "its replicas send parameters, and a codec needs changes"),
    Refusal("sync!=step offload.optimizer!=device", "offload=none", "replicas agree about state on the device"),
    Refusal("sync=step offload.outer!=device", "offload=none", "only replicas that differ keep an outer state"),
    Refusal("server=0 staleness!=0", "staleness=0", "only servers apply gradients late"),
    Refusal("staleness=0 correction!=none", "correction=none", "only late gradients are corrected"),
    Refusal("server>0 zero>0", "zero=0", "the servers hold the optimizer, and workers the whole parameters"),
    *(Refusal(f"server>0 {axis}>1", "server=0", "servers serve workers of dp alone") for axis in ("tp", "pp", "cp")),
    Refusal("server>0 ep>1", "ep=1", "workers hold every expert whole"),
    Refusal("server>0 precision=fp16", "precision=bf16", "each worker would have its own loss scale"),
    Refusal("server>0 wire!=auto", "wire=auto", "gradients are pushed in the dtype in which they are accumulated"),
    Refusal("server>0 offload.optimizer!=device", "offload=none", "servers keep their state on the device"),
)
"""All combinations that are refused. A new feature removes its rows; a feature with a limit adds a row."""

ALONE = (Refusal("dp=1 sync!=step", "sync=step", "only replicas agree across steps, of this job or of jobs that join"),)
"""Combinations that are refused unless the job joins others (`train.sync.join`)."""

MOMENTUM_EXCHANGE = (
    Refusal("zero>=2", "zero=1", "it needs the whole gradients of a rank"),
    Refusal("wire.codec!=none", "wire=auto", "it has a codec of its own"),
    Refusal("shards>0", "shards=0", "it sums over all ranks of dp at once"),
    Refusal("sync!=step", "sync=step", "its replicas agree in each step"),
    Refusal("server>0", "server=0", "servers hold shards of the state"),
)
"""Combinations that are refused with an optimizer that exchanges momenta, such as `OneBitAdam`."""
