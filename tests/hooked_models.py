"""Models with hooks, trained by a plan and by a plain torch loop on one process, for comparison."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan
from meshwise.testing import run

WIDTH, BOUND = 6, 1e-9
Hook = Callable[[nn.Module], object]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        output: Tensor = x + self.down(torch.tanh(self.up(x))) * scale
        return output


class Body(nn.Module):
    """Blocks in a module that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(WIDTH, 2)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                numbers = torch.arange(float(parameter.numel())).view(parameter.shape)
                parameter.copy_(torch.sin(numbers * (number + 2)) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x))
        return output


def doubled(_module: nn.Module, gradients: Any, _of_output: Any = None) -> Any:
    """Twice each gradient: of what a module was given, or, given those alone, of what it returned."""
    return tuple(None if one is None else 2 * one for one in gradients)


def stronger(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 1.5


def batch() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def loss(output: Tensor, _batch: Tensor) -> tuple[Tensor, int]:
    return (output - 1).square().sum(), output.numel()


def hooked(hook: Hook) -> nn.Module:
    model = Model().double()
    hook(model)
    return model


def trainer(world: World, plan: str, model: Any, **options: Any) -> Trainer:
    chosen = Options(**{"example": batch(), **options})
    return parallelize(model, plan, world=world, loss=loss, optimizer=torch.optim.SGD, lr=0.05, options=chosen)


def by_one(hook: Hook) -> list[tuple[float, float]]:
    """Loss and norm of two steps, of a loop that is no more than torch's own."""
    model, found = hooked(hook), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        total, count = loss(model(batch()), batch())
        mean = total / count
        mean.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append((mean.item(), torch.cat([one.flatten() for one in gradients]).norm().item()))
        optimizer.step()
    return found


def by_plan(plan: str, model: Callable[[], Any], *, late: Hook | None = None, **options: Any) -> Any:
    """The same under a plan. `late`: hooks that are put on the model once it is in stages, on every rank's part."""

    def main(world: World) -> list[tuple[float, float]]:
        training = trainer(world, plan, model(), **options)
        for module in training.modules if late is not None else ():
            assert late is not None
            late(module)
        steps = [training.step(batch()) for _ in range(2)]
        return [(float(step.loss), float(step.grad_norm)) for step in steps]

    return run(Plan.parse(plan).mesh().size, main)


def agrees(found: Any, wanted: Any) -> None:
    for ranks in found:
        torch.testing.assert_close(_exact(ranks), _exact(wanted), rtol=0, atol=BOUND)


def _exact(steps: Any) -> Tensor:
    return torch.tensor(steps, dtype=torch.float64)
