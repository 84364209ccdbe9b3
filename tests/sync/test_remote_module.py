"""Test modules that live on another rank: results, gradients and updates are those of one process, to 1e-12."""

import pickle
import weakref
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


class Reversed(nn.Module):
    """Change the input in place, and return complex values, or a dict."""

    def forward(self, x: Tensor, *, named: bool = False) -> Any:
        y = torch.view_as_complex(x.neg_())
        return {"y": y} if named else y


def odd_module(world: World) -> Any:
    served = mw.remote(Reversed, world=world, rank=1)
    if served.here:
        return served.serve()
    x = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    served(x).imag.sum().backward()
    with pytest.raises(RuntimeError, match="the module returned dict"):
        served(x, named=True)
    with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
        served(x, named=lambda: 0)
    with torch.no_grad():
        assert served(x).dtype == torch.complex128
    served.close()
    return x.grad


def test_modules_may_write_to_inputs_and_return_complex_values() -> None:
    grad, _ = run(2, odd_module)
    assert grad.tolist() == [[0.0, -1.0]] * 3


def opposite_orders(world: World) -> int:
    """Two callers take the answers of two owners in opposite orders; an answer is larger than a queue holds."""
    served = [mw.remote(nn.Identity, world=world, rank=rank, callers=[0, 1]) for rank in (2, 3)]
    for each in served:
        if each.here:
            each.serve()
            return 0
    x = torch.ones(1_500_000, dtype=torch.float64)
    mine = served if world.rank == 0 else served[::-1]
    call = mine[0].begin(x)
    total = int(mine[1](x).sum() + call.wait().sum())
    for each in served:
        each.close()
    return total


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_answers_may_be_taken_in_any_order(on: Any) -> None:
    assert run(4, opposite_orders, on=on) == [3_000_000, 3_000_000, 0, 0]


def without_a_backward(world: World) -> int:
    served = mw.remote(tower, args=(1,), world=world, rank=1)
    if served.here:
        served.serve()
        return 0
    call = served.begin(torch.ones(2, 3, dtype=torch.float64))
    call.wait()
    left = weakref.ref(call)
    del call
    served.close()
    return int(left() is not None)


def test_a_call_without_a_backward_is_freed() -> None:
    assert run(2, without_a_backward) == [0, 0]


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


class Scaled(nn.Module):
    """Scale by a keyword; return the tensor, None or a number."""

    def forward(self, x: Tensor, *, scale: Any = 1.0, kind: str = "tensor") -> Any:
        return {"tensor": x * scale, "none": None, "number": 1.0}[kind]


def wrong_uses(world: World) -> Any:
    served: Any = mw.remote(Scaled, world=world, rank=1)
    if served.here:
        return served.serve()
    x, scale = torch.ones(3, dtype=torch.float64, requires_grad=True), torch.full((3,), 2.0, dtype=torch.float64)
    call = served.begin(x, scale=scale)
    kept = call.wait()
    wrong = [
        ("ValueError: keywords get no gradient", lambda: served(x, scale=[scale.clone().requires_grad_()])),
        ("TypeError: inputs of a remote module are tensors, not int", lambda: served(x, 3)),
        ("RuntimeError: .* has returned its results; call wait\\(\\) once", call.wait),
        ("RuntimeError: rank 1.*the module returned NoneType; return a tensor", lambda: served(x, kind="none")),
        ("RuntimeError: rank 1.*the module returned float; return a tensor", lambda: served(x, kind="number")),
    ]
    for message, use in wrong:
        refuses(message, use)
    kept.sum().backward()
    late = served(x)
    served.close()
    served.close()
    for use in (lambda: served(x), served.step, late.sum().backward):
        refuses("RuntimeError: rank 0 has called close", use)
    return x.grad


def refuses(message: str, use: Any) -> None:
    with pytest.raises(Exception, match=message.partition(": ")[2]) as raised:
        use()
    assert type(raised.value).__name__ == message.partition(":")[0]


def test_a_wrong_use_is_one_error_and_the_module_serves_on() -> None:
    grad, _ = run(2, wrong_uses)
    assert grad.tolist() == [2.0, 2.0, 2.0]
