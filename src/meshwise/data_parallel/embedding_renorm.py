"""Refuse plans under which an embedding with `max_norm` would train wrongly.

The forward of such an embedding scales down, in place, the weight rows that it looks up. Ranks with other batch rows
look up other weight rows, so their copies of the weight would differ. If a separate master is updated, the next update
would undo the scaling. So only one copy of the weight may exist."""

from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.data_parallel.bucket import StorageConfig
from meshwise.plan import Plan, PlanError


def refuse_renormed(module: nn.Module, *, plan: Plan, world: World, storage: StorageConfig) -> None:
    """Raise PlanError for an embedding with `max_norm` if other copies, or a master, of its weight exist."""
    owners: dict[Tensor, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        owners[parameter] = owners.get(parameter, 0) + 1
    for name, part in module.named_modules():
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag) or part.max_norm is None:
            continue
        stored = storage.precision.parameters or part.weight.dtype
        if world.group(plan.loss_axes).size > 1:
            wrong = "other ranks look up other rows. Nearest that works: dp=1, and tp_mode=1d if tp > 1"
        elif storage.precision.master_of(stored) != stored:
            wrong = "a master of another dtype is updated. Nearest that works: precision=fp32, with a model in fp32"
        elif storage.tiers.is_offloaded("masters") or storage.tiers.is_offloaded("params"):
            wrong = "the tensor that is updated is on another tier. Nearest that works: offload=none"
        elif plan.pp > 1 and owners[part.weight] > 1:
            wrong = "another stage may have a copy of it. Nearest that works: pp=1"
        else:
            continue
        raise PlanError(
            f"{name or type(part).__name__} has max_norm={part.max_norm:g}: its forward rescales the rows of its "
            f"weight that it looks up, and under the plan '{plan}' there are other copies: {wrong}"
        )
