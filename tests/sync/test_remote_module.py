"""Test modules that live on another rank: results, gradients and updates are those of one process, to 1e-12."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwise as mw
from meshwise.comm.api.world import World
from meshwise.testing import run

STEPS = 4


class Tower(nn.Module):
    """An embedding of rows and a scale: values (B, 3) to (B, 4), and their norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        y = self.layers(x) * scale
        return y, y.square().sum()


def tower(seed: int) -> Tower:
    torch.manual_seed(seed)
    return Tower()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def rows(step: int, caller: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * caller + step)
    left, right = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    return left, right


def loss_of(users: Any, items: Any, x: Tensor, y: Tensor) -> Tensor:
    """Contrast rows of two towers; the second call of `items` takes a result of `users` apart from the batch."""
    left, norm = users(x)
    right, _ = items(y, scale=0.5)
    again, _ = items(left[:, :3])
    logits = left @ right.T + again @ right.T
    loss: Tensor = nn.functional.cross_entropy(logits, torch.arange(len(x))) + 0.01 * norm
    return loss


def expected(callers: int) -> list[Any]:
    users, items = tower(1), tower(2)
    optimizer = sgd([*users.parameters(), *items.parameters()])
    losses = []
    for step in range(STEPS):
        found = [loss_of(users, items, *rows(step, caller)) for caller in range(callers)]
        torch.stack(found).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in found])
    return [losses, users.state_dict(), items.state_dict()]


def two_towers(world: World, callers: int) -> Any:
    """Ranks 0 … callers - 1 train; the last two each have a tower."""
    names = range(callers)
    users = mw.remote(tower, args=(1,), world=world, rank=callers, callers=names, optimizer=sgd)
    items = mw.remote(tower, args=(2,), world=world, rank=callers + 1, callers=names, optimizer=sgd)
    for each in (users, items):
        if each.here:
            each.serve()
            return each.module.state_dict()
    losses = []
    for step in range(STEPS):
        loss = loss_of(users, items, *rows(step, world.rank))
        loss.backward()
        users.step()
        items.step()
        losses.append(loss.item())
    users.close()
    items.close()
    return losses


class OverGloo:
    """Processes that are joined by gloo."""

    def run(self, size: int, main: Any, *, args: tuple[Any, ...] = ()) -> list[Any]:
        return mw.run(size, main, args=args, comm="gloo")


CASES = [("threads", 1), ("threads", 2), ("processes", 2), (OverGloo(), 2)]


@pytest.mark.parametrize("on, callers", CASES, ids=["one caller", "two callers", "processes", "gloo"])
def test_two_towers_train_as_in_one_process(on: Any, callers: int) -> None:
    losses, *states = expected(callers)
    found = run(callers + 2, two_towers, on=on, args=(callers,))
    for caller in range(callers):
        torch.testing.assert_close(found[caller], [each[caller] for each in losses], rtol=1e-12, atol=1e-12)
    for state, right in zip(found[callers:], states, strict=True):
        torch.testing.assert_close(state, right, rtol=1e-12, atol=1e-12)


def gradients_of_inputs(world: World) -> Any:
    served = mw.remote(tower, args=(1,), world=world, rank=1)
    if served.here:
        return served.serve()
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    first, second = served.begin(x), served.begin(2 * x, scale=3.0)  # both run before either result is taken
    (y2, _), (y1, _) = second.wait(), first.wait()
    (y1.sum() + (y1 * y2).sum()).backward()
    with torch.no_grad():
        free, _ = served(x)
    served.close()
    return x.grad, y1.detach(), free, free.requires_grad


def test_inputs_get_their_gradients_and_calls_overlap() -> None:
    here = tower(1)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    y1, y2 = here(x)[0], here(2 * x, scale=3.0)[0]
    (y1.sum() + (y1 * y2).sum()).backward()
    [(grad, first, free, needs), _] = run(2, gradients_of_inputs)
    torch.testing.assert_close(grad, x.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first, y1.detach(), rtol=0, atol=0)
    torch.testing.assert_close(free, y1.detach(), rtol=0, atol=0)
    assert not needs


def fails(world: World) -> Any:
    served = mw.remote(tower, args=(1,), world=world, rank=1)
    if served.here:
        return served.serve()
    messages = []
    for wrong in (lambda: served(torch.ones(2, 7, dtype=torch.float64)), served.step):
        try:
            wrong()
        except RuntimeError as error:
            messages.append(str(error))
    result, _ = served(torch.ones(2, 3, dtype=torch.float64))
    served.close()
    return messages, tuple(result.shape)


def test_an_error_of_the_module_is_raised_by_the_call_and_the_module_serves_on() -> None:
    [(messages, shape), _] = run(2, fails)
    assert "rank 1" in messages[0]
    assert "7" in messages[0]
    assert "optimizer" in messages[1]
    assert shape == (2, 4)


def forgotten(world: World) -> str:
    served = mw.remote(tower, args=(1,), world=world, rank=1, optimizer=sgd)
    if served.here:
        served.serve()
        return ""
    _, norm = served(torch.ones(2, 3, dtype=torch.float64))
    served.step()
    with pytest.raises(RuntimeError, match=r"rank 1.*a backward after its step\(\)"):
        norm.backward()
    served.close()
    return "said"


def test_a_step_forgets_calls_without_a_backward() -> None:
    assert run(2, forgotten) == ["said", ""]


def wrong_ranks(world: World) -> str:
    with pytest.raises(ValueError, match="rank=5"):
        mw.remote(tower, args=(1,), world=world, rank=5)
    with pytest.raises(ValueError, match="callers="):
        mw.remote(tower, args=(1,), world=world, rank=1, callers=[0, 1])
    served = mw.remote(tower, args=(1,), world=world, rank=1)
    if not served.here:
        with pytest.raises(RuntimeError, match="only on rank 1"):
            served.serve()
        served.close()
        return "said"
    with pytest.raises(RuntimeError, match="rank 1 has the module"):
        served(torch.ones(1, 3))
    served.serve()
    return ""


def test_wrong_ranks_are_named() -> None:
    assert run(2, wrong_ranks) == ["said", ""]
