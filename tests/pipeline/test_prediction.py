"""A prediction equals the output of one process, or an error names the outputs that other stages have."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import PlanError
from meshwise.testing import agree, run

WIDTH = 6


class Hidden(nn.Module):
    """Returns what it has made on the way, in some form."""

    def __init__(self, form: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.form = form

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = []
        for layer in self.layers:
            x = layer(x).tanh()
            hidden.append(x)
        return {"out": x, "more": self.form(hidden)}


def squares(output: Any, batch: Tensor) -> tuple[Tensor, int]:
    return output["out"].square().sum(), batch.shape[0]


def predicted(form: Callable[[list[Tensor]], Any], plan: str, loss: Any = squares) -> list[Any]:
    """Return the prediction of each rank, and of one process."""
    batch = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Hidden(form).double()

    def main(world: World) -> Any:
        # By hand where there are two stages: layers as small as these take times that mean nothing.
        cut = CutOptions(at=("layers.3",)) if plan == "pp=2" else CutOptions()
        options = Options(example=batch, cut=cut)
        trainer = parallelize(copy.deepcopy(model), plan, loss=loss, world=world, lr=0.1, options=options)
        agree(trainer.predict(batch), model(batch), bound=1e-12)
        trainer.step(batch)
        return trainer.predict(batch)["out"]

    return run(2, main)


@pytest.mark.parametrize("form", [lambda hidden: hidden, lambda hidden: {"all": hidden[0] * 2}])
@pytest.mark.parametrize("plan", ["pp=2", "pp=2 schedule=interleaved virtual_stages=2 microbatches=2"])
def test_outputs_of_other_stages_are_named_in_the_error(form: Any, plan: str) -> None:
    with pytest.raises(PlanError, match="predict would return NaN in more: an earlier stage computes it"):
        predicted(form, plan)


@pytest.mark.parametrize(
    "form", [lambda hidden: hidden[-1:], lambda hidden: torch.zeros_like(hidden[0]), lambda hidden: hidden[0].shape[0]]
)
def test_outputs_of_the_last_stage_are_returned(form: Any) -> None:
    first, second = predicted(form, "pp=2")
    agree(first, second, bound=0.0)


def test_outputs_that_the_loss_uses_are_returned() -> None:
    def loss(output: Any, batch: Tensor) -> tuple[Tensor, int]:
        return output["out"].square().sum() + sum(x.sum() for x in output["more"]), batch.shape[0]

    first, second = predicted(lambda hidden: hidden, "pp=2", loss)
    agree(first, second, bound=0.0)
