"""Embeddings with `max_norm`, which write to their weight in their forward.

The rows that are looked up are scaled down where they are read. Ranks with other rows of the batch look up other
entries, and the updated tensor may not be the one that is read. Then the copies of the weight differ, or the next
update undoes the change. So it works only for a weight that exists in a single copy.
"""

from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.data_parallel.bucket import StorageConfig
from meshwise.plan import Plan, PlanError


def refuse_renormed(module: nn.Module, *, plan: Plan, world: World, storage: StorageConfig) -> None:
    """Raise PlanError for an embedding with `max_norm` whose weight has more copies than the one it rescales."""
    owners: dict[Tensor, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        owners[parameter] = owners.get(parameter, 0) + 1
    for name, part in module.named_modules():
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag) or part.max_norm is None:
            continue
        stored = storage.precision.parameters or part.weight.dtype
        if world.group(plan.loss_axes).size > 1:
            wrong = "here other ranks look up others. Nearest that works: dp=1, in tp_mode=1d if at all"
        elif storage.precision.master_of(stored) != stored:
            wrong = "here a master of another dtype is updated. Nearest that works: precision=fp32, of a model in fp32"
        elif storage.tiers.is_offloaded("masters") or storage.tiers.is_offloaded("params"):
            wrong = "here what is updated rests elsewhere. Nearest that works: offload=none"
        elif plan.pp > 1 and owners[part.weight] > 1:
            wrong = "here another stage may have a copy of it. Nearest that works: pp=1"
        else:
            continue
        raise PlanError(
            f"{name or type(part).__name__} has max_norm={part.max_norm:g}: its forward rescales the rows of its "
            f"weight that it looks up, and under the plan '{plan}' there are other copies: {wrong}"
        )
