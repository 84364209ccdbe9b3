"""Give every rank what the first rank has: a function's result or error, and a model's parameters and buffers."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from meshwise.comm.api.launcher_info import RankLostError
from meshwise.comm.api.world import World
from meshwise.comm.launch.rank_process import picklable
from meshwise.model.deferred_init import ParameterSource
from meshwise.precision.dtype_policy import Precision, place_buffer

Result = TypeVar("Result")


def on_first_rank(
    call: Callable[[], Result], *, world: World, shared: tuple[type[Exception], ...] = (Exception,)
) -> Result:
    """Return the result of `call`, which runs on the first rank, on every rank (collective).

    Every rank raises an error of a class in `shared`. After any other error the other ranks raise RankLostError."""
    own: Exception | None = None
    outcome: tuple[Any, BaseException | None] = None, None
    if world.rank == 0:
        try:
            outcome = call(), None
        except Exception as error:  # noqa: BLE001 -- raised below, after the other ranks have received it
            own = error
            lost = RankLostError(f"rank 0 failed: {type(error).__name__}: {error}")
            outcome = None, picklable(error) if isinstance(error, shared) else lost
    result, sent = world.exchange(outcome)[0]
    if failed := own or sent:
        raise failed
    found: Result = result
    return found


def share_parameters(source: ParameterSource, *, world: World) -> None:
    """Give every rank the first rank's values of the parameters of a model that was given with values."""
    for name, parameter in source.module.named_parameters():
        value = source.broadcast_full(name, world=world)
        source.full(name).copy_(value)
        parameter.detach().copy_(value)


def place_buffers(source: ParameterSource, *, world: World, precision: Precision) -> None:
    """Move buffers, whole, to every rank's device; of a model that was given with values, the first rank's values."""
    source.fill_buffers()
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in source.module.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer not in made:
                made[buffer] = place_buffer(buffer, precision=precision, device=world.device)
                if not source.deferred:
                    world.broadcast(made[buffer], axes=world.mesh.names).wait()
            setattr(module, name, made[buffer])
