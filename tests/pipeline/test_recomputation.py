"""Blocks and stages whose forward is repeated in the backward, in pipelines of every schedule."""

from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import PlanError
from meshwise.testing import run
from pipeline.training import WIDTH, Chain, images, linears, made, numbers, squares, trainer, trains_like_one
from reference.convolutional import ResNet


class Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(*linears(2), nn.Dropout(0.3)), reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_recomputation_by_the_model_itself(schedule: str, reentrant: bool) -> None:
    model = made(lambda: Chain(nn.Linear(WIDTH, WIDTH), *(Recomputed(reentrant=reentrant) for _ in range(3))))
    trains_like_one(model, f"pp=2 microbatches=3 schedule={schedule}", numbers(6, 5, 4))


@pytest.mark.parametrize(
    "plan, recompute",
    [
        ("schedule=1f1b", "selective"),
        ("schedule=zb-h1", "full"),
        ("schedule=zb-h1", "selective"),
        ("schedule=naive", "full"),
        ("schedule=looped virtual_stages=2", "selective"),
        ("schedule=interleaved virtual_stages=2", "full"),
        ("schedule=zb-h2", "selective"),
        ("schedule=dualpipev virtual_stages=2", "full"),
    ],
)
def test_recomputation_by_the_plan(plan: str, recompute: str) -> None:
    model = made(lambda: Chain(*(nn.Sequential(*linears(2), nn.Dropout(0.3)) for _ in range(4))))
    trains_like_one(model, f"pp=2 microbatches=4 {plan} recompute={recompute}", numbers(6, 5, 4))


@pytest.mark.parametrize(
    "plan",
    [
        "pp=2 microbatches=3 schedule=zb-h1 recompute=selective",
        "pp=2 dp=2 zero=3 microbatches=2 schedule=gpipe recompute=full",
        "pp=2 microbatches=4 schedule=zb-v virtual_stages=2 recompute=full",
    ],
)
def test_a_stage_of_a_trace_is_recomputed_as_one(plan: str) -> None:
    trains_like_one(made(lambda: ResNet(1)), plan, images(8, 7, 8), where=CutOptions(how="trace"))


def test_a_stage_of_a_trace_is_repeated_once_a_micro_batch() -> None:
    def convolutions(world: World, words: str) -> int:
        options, calls = Options(example=images(4)[0], cut=CutOptions(how="trace")), []
        split = trainer(world, f"pp=2 microbatches=4 {words}", made(lambda: ResNet(1)), loss=squares, options=options)
        for part in (part for module in split.modules for part in module.modules() if isinstance(part, nn.Conv2d)):
            part.register_forward_pre_hook(lambda *_: calls.append(1))
        split.step(images(4)[0])
        split.close()
        return len(calls)

    once, again = (sum(run(2, convolutions, args=(words,))) for words in ("recompute=none", "recompute=full"))
    assert again == 2 * once


@pytest.mark.parametrize(
    "plan, recomputed, message",
    [
        ("pp=2 microbatches=2 recompute=full", ("layer1.0",), "does not call that as a whole"),
        ("pp=2 microbatches=2 budget=1M", (), "has no blocks to choose among"),
    ],
)
def test_what_a_trace_cannot_recompute_is_refused(plan: str, recomputed: tuple[str, ...], message: str) -> None:
    options = Options(example=images(4)[0], cut=CutOptions(how="trace"), recomputed=recomputed)
    with pytest.raises(PlanError, match=message):
        run(2, lambda world: trainer(world, plan, made(lambda: ResNet(1)), loss=squares, options=options))
