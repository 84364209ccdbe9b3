"""Blocks and stages whose forward is repeated in the backward, in pipelines of every schedule."""

from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.training import WIDTH, Chain, linears, made, numbers, trains_like_one


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
