"""Test that settings which cannot work are refused with a line to change, and that no message crosses a round."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import PlanError
from meshwise.testing import count, run
from sync.test_replay import batch, made

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dp=2 sync=local", {"outer_rl": 0.5}, "no setting 'outer_rl'; did you mean outer_lr?"),
    ("dp=2 sync=local", {"xyz": 1}, "no setting 'xyz'; the settings are graph, outer_lr, "),
    ("dp=2 sync=diloco every=4", {"wire": "int4"}, "no setting 'wire'; it is a key of the plan: write wire=int4 there"),
    ("dp=2 sync=local wire=int8", {"group": 2}, "in the plan, sync=local and wire=auto"),
    ("dp=2 sync=local", {"state": "mine"}, "state='mine' is none of keep, mean, reset; write state=keep"),
    ("dp=2 sync=local", {"after": -1}, "after=-1 is no whole number of at least 0; write after=0"),
    ("dp=2 sync=diloco every=4", {"outer_momentum": 1.0}, "outer_momentum=1.0"),
    ("dp=2 sync=diloco every=4", {"outer_lr": 0.0}, "write outer_lr=0.7"),
    ("dp=2 sync=diloco every=4", {"blend": 1.0}, "outer_momentum=0.9, blend=1.0"),
    ("dp=2 sync=easgd", {"outer_lr": 2.5}, "1 - outer_lr / 2; leave blend out, set outer_lr=0.9"),
    ("dp=2 sync=diloco every=4", {"delay": 4}, "write fragments=1 delay=0, or every=5 in the plan"),
    ("dp=2 sync=diloco every=4", {"fragments": 5}, "or every=5 in the plan"),
    ("dp=2 sync=diloco every=4", {"delay": 1, "after": 2}, "write delay=0"),
    ("dp=2 sync=diloco every=4", {"graph": "ring"}, "write graph=all"),
    ("dp=2 sync=gossip every=4", {"fragments": 2}, "write graph=all"),
    ("dp=2 sync=gossip", {"group": 2}, "write graph=all"),
    ("dp=2 sync=local every=4", {"group": 2, "fragments": 2}, "write group=0"),
    ("dp=2 sync=diloco every=4", {"group": 2}, "write group=0"),
    ("dp=2 sync=local every=4", {"group": 3}, "group=3 does not divide the 2 replicas"),
    ("dp=2 sync=easgd", {"blend": 0.5}, "leave blend out, set outer_lr"),
    ("dp=3 sync=gossip", {"graph": "groups:2"}, "does not divide the 3 replicas of the plan; write graph=ring"),
    ("dp=2 sync=gossip", {"graph": "star"}, "groups:2 or edges such as 0-1$"),
    ("dp=3 sync=gossip", {"graph": "0-1"}, "or they never agree. Write graph=0-1,1-2$"),
    ("dp=2 sync=gossip", {"graph": "0-1,5-6"}, "name no others, or they never agree. Write graph=0-1$"),
    ("dp=3 sync=gossip", {"graph": "0-1,1-2,2-3"}, "must connect the replicas 0 to 2, and name no others"),
    ("dp=2", {"graph": "ring"}, "write sync=local in the plan"),
    ("dp=2 sync=local every=4", {"delay": 1}, "state back by as many steps under state=mean; write state=keep"),
    ("dp=2 sync=diloco every=4", {"outer_lr": "0.5"}, "outer_lr='0.5' is no finite number; write outer_lr=1.0"),
    ("dp=2 sync=diloco every=4", {"outer_lr": float("inf")}, "outer_lr=inf is no finite number"),
    ("dp=2 sync=diloco every=4", {"outer_momentum": None}, "outer_momentum=None is no finite number"),
    ("dp=2 sync=diloco every=4", {"nesterov": "no"}, "nesterov='no' is no true or false; write nesterov=False"),
    ("dp=2 sync=gossip", {"graph": 3}, "graph=3 is no text; write graph=all"),
    ("dp=2 sync=local", [1], "sync=[1] is no table of settings; write sync={'outer_lr': 0.5}"),  # type: ignore[list-item]
]  # fmt: skip


@pytest.mark.parametrize("plan, settings, message", REFUSED)
def test_settings_that_cannot_work_are_refused(plan: str, settings: dict[str, Any], message: str) -> None:
    def main(world: World) -> None:
        with pytest.raises(PlanError, match=re.escape(message).replace(r"\$", "$")):
            made(world, plan, settings=settings)

    run(int(plan[3]), main)


def test_models_and_steps_that_need_every_replica_are_refused() -> None:
    def squares(output: torch.Tensor, _batch: Any) -> tuple[torch.Tensor, int]:
        return output.square().sum(), output.shape[0]

    def main(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        with pytest.raises(PlanError, match=r"1 has running statistics.* use GroupNorm"):
            parallelize(model, "dp=2 sync=local", loss=squares, world=world)
        with pytest.raises(PlanError, match="noise of gradients"):
            parallelize(nn.Linear(3, 3), "dp=2 sync=local", loss=squares, world=world, options=Options(noise=True))
        trainer = parallelize(nn.Linear(3, 3), "dp=2 sync=local every=2", loss=squares, world=world)
        with pytest.raises(PlanError, match="open_step sums gradients over replicas"):
            trainer.open_step()
        with pytest.raises(ValueError, match=r"the batch has 1 rows for 2 replicas .* drop_last=True"):
            trainer.step(torch.ones(1, 3))

    run(2, main)


def test_replicas_exchange_nothing_within_a_round_and_their_parameters_once() -> None:
    def main(world: World, plan: str, settings: dict[str, Any]) -> None:
        trainer = made(world, plan, settings=settings)
        size = 8 * sum(row.numel for row in trainer.table.rows)
        with trainer.world.record() as calls:
            for number in range(3):
                trainer.step(batch(number))
        assert not count(calls)
        with trainer.world.record() as calls:
            trainer.step(batch(3))
        found = count(calls)
        total = sum(moved for _, moved in found.values())
        expected = {"local": 3 * size, "diloco": size, "gossip": 2 * size}[plan.split("sync=")[1].split(maxsplit=1)[0]]
        assert expected <= total < expected * 1.05 + 2048, found

    for plan, settings in (
        ("dp=2 sync=local every=4", {}),
        ("dp=2 sync=diloco every=4", {}),
        ("dp=4 sync=gossip every=4", {"graph": "exponential"}),
    ):
        run(int(plan[3]), main, args=(plan, settings))
