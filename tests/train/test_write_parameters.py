"""The file of a trained model is what a plain module of the same class loads."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.testing import run
from meshwise.train.loop import write_parameters


class Counted(nn.Linear):
    """A layer that counts its calls in a buffer."""

    calls: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Counting(nn.Module):
    """With a tied weight, buffers that persist and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Counted(4), nn.Linear(4, 4, bias=False)
        self.outer.weight = self.inner.weight
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("table", torch.arange(4), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.outer(torch.tanh(self.inner(x)))


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2 zero=1", "dp=2 zero=3", "pp=2"])
def test_a_plain_module_loads_the_file_and_gives_the_same(plan: str, tmp_path: Path) -> None:
    file, batch = tmp_path / "parameters.safetensors", torch.randn(4, 4)

    def main(world: World) -> Tensor:
        options = Options(example=batch)
        trainer = parallelize(Counting, plan, loss=squares, world=world, options=options, lr=0.1)
        trainer.step(batch)
        write_parameters(trainer, path=None if world.rank else file, metadata={})
        predicted: Tensor = trainer.predict(batch)
        return predicted

    predicted = run(int(plan[3]), main)[0]
    loaded = load_file(file)
    model = Counting()
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    assert (missing, unexpected) == (["outer.weight"], []), "a tied parameter is written once"
    assert set(loaded) == {"inner.weight", "inner.bias", "inner.calls", "mean"}
    assert model.inner.calls == 1
    assert torch.equal(model(batch), predicted)


def test_a_full_disk_is_told_with_the_file_and_leaves_no_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "parameters.safetensors"

    def main(world: World) -> None:
        trainer = parallelize(Counting, "dp=1", loss=squares, world=world, lr=0.1)
        full = mock.patch("meshwise.base.atomic_file.os.fsync", side_effect=OSError(28, "No space left on device"))
        with full, pytest.raises(OSError, match=r"No space left on device: '.*parameters\.safetensors'"):
            write_parameters(trainer, path=file, metadata={})

    run(1, main)
    assert list(tmp_path.iterdir()) == []
