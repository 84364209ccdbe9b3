"""I and then W is one backward: the same gradients, the same matrix products."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from meshwise.pipeline.run.stage_backward import backward_input
from meshwise.reference.gpt import Block, GPTConfig

pytestmark = pytest.mark.usefixtures("float64")

CONFIG = GPTConfig(vocabulary=31, context=12, layers=2, heads=2, width=8, positions="rotary")


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return func(*args, **(kwargs or {}))


class Twice(nn.Module):
    """One matrix in two places of the way down, another that the input never meets, a third through a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.bare, self.scaled = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.scaled / self.scaled.norm(dim=1, keepdim=True)
        return functional.linear((x @ self.shared).tanh() @ self.shared + self.bare.exp().sum(0), weight)


class Recomputed(nn.Module):
    """A block under torch's activation checkpoint, between layers that are not."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.before, self.block, self.after = nn.Linear(8, 8), Block(CONFIG), nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(checkpoint(self.block, self.before(x), use_reentrant=self.reentrant))
        return out


MODULES: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: nn.Sequential(Block(CONFIG), Block(CONFIG)),
    "shared": Twice,
    "convolutions": lambda: nn.Sequential(nn.Conv1d(12, 6, 3), nn.BatchNorm1d(6), nn.ReLU(inplace=True)),
    "recomputed": lambda: Recomputed(reentrant=False),
    "recomputed, reentrant": lambda: Recomputed(reentrant=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_i_and_w_are_the_backward(name: str) -> None:
    model = MODULES[name]()
    x = torch.randn(2, 12, 8, requires_grad=True)
    out = model(x)
    gradient = torch.randn_like(out)
    with Products() as whole:
        out.backward(gradient)
    expected = [x.grad, *(parameter.grad for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    out = model(x)
    with Products() as parts:
        weights = backward_input([out], gradients=[gradient], received=[x], parameters=model.parameters())
        torch.testing.assert_close(x.grad, expected[0], rtol=1e-12, atol=1e-15)
        during_input = parts.count
        weights.run()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert parts.count == whole.count, "nothing is computed twice, nothing that was thrown away more than once again"
    if name in ("blocks", "recomputed"):
        assert during_input < parts.count


def only(gradients: Any) -> Tensor:
    """The gradient of the one tensor that there is."""
    [gradient] = gradients
    assert isinstance(gradient, Tensor)
    return gradient


class Hooked(nn.Module):
    """Hooks on tensors and on modules that change gradients, above parameters and next to them."""

    def __init__(self, *, on: str) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.rand(8))
        self.on = on
        if on == "module":
            self.up.register_full_backward_pre_hook(lambda _, gradients: (2 * only(gradients),))
            self.down.register_full_backward_hook(lambda _, given, __: (3 * only(given),))
        if on == "parameter":
            self.up.weight.register_hook(lambda gradient: 1.5 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.on == "product":
            hidden.register_hook(lambda gradient: 2 * gradient)
        hidden = hidden.tanh() * self.scale
        if self.on == "scale":
            hidden.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        out: Tensor = self.down(hidden)
        if self.on == "output":
            out.register_hook(lambda gradient: 0.5 * gradient)
        if self.on == "node":
            assert out.grad_fn is not None
            out.grad_fn.register_prehook(lambda gradients: tuple(3 * one for one in gradients))
        return out


@pytest.mark.parametrize(
    "on, received",
    [(on, True) for on in ("product", "scale", "output", "node", "module", "parameter")]
    + [(on, False) for on in ("product", "scale", "output", "node", "parameter")],
)
def test_hooks_change_a_gradient_once(on: str, received: bool) -> None:
    model = nn.Sequential(Hooked(on=on), Hooked(on=on))
    x = torch.randn(4, 8, requires_grad=received)
    gradient = torch.randn(4, 8)
    model(x).backward(gradient)
    expected = [x.grad, *(parameter.grad for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    given = [x] if received else []
    backward_input([model(x)], gradients=[gradient], received=given, parameters=model.parameters()).run()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


class Remembered(nn.Module):
    """Its tensors, without holding them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.seen = nn.Linear(8, 32), nn.Linear(32, 8), list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        before = self.up(x)
        after = functional.gelu(before)
        self.seen = [weakref.ref(tensor.untyped_storage()) for tensor in (before, after)]
        out: Tensor = self.down(after)
        return out


def test_saved_tensors_that_w_does_not_need_are_freed_after_i() -> None:
    """The second product needs its input, which is the activation's output; nobody needs the activation's input."""
    model = Remembered()
    x = torch.randn(2, 12, 8, requires_grad=True)
    out = model(x)
    before, after = model.seen
    weights = backward_input([out], gradients=[torch.ones_like(out)], received=[x], parameters=model.parameters())
    del out
    assert before() is None
    assert after() is not None
    weights.run()
    assert after() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_i_and_w_are_the_backward_bit_by_bit(dtype: torch.dtype) -> None:
    model = nn.Sequential(Block(CONFIG), Block(CONFIG)).to(dtype)
    x = torch.randn(2, 12, 8).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    out.backward(torch.ones_like(out), retain_graph=True)
    expected = [x.grad, *(parameter.grad for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    weights = backward_input([out], gradients=[torch.ones_like(out)], received=[x], parameters=model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    weights.run()
    for found, wanted in zip([x.grad, *(p.grad for p in model.parameters())], expected, strict=True):
        assert found is not None
        assert wanted is not None
        assert torch.equal(found, wanted)


def test_w_computes_all_parameter_gradients_and_may_run_later() -> None:
    """Micro-batches in flight: all I first, then all W."""
    model = nn.Sequential(Block(CONFIG), Block(CONFIG))
    inputs = [torch.randn(2, size, 8, requires_grad=True) for size in (12, 5, 7)]
    sum(model(x).square().sum() for x in inputs).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    outputs = [model(x) for x in inputs]
    waiting = [
        backward_input([out], gradients=[2 * out.detach()], received=[x], parameters=model.parameters())
        for out, x in zip(outputs, inputs, strict=True)
    ]
    assert all(parameter.grad is None for parameter in model.parameters())
    for weights in waiting:
        weights.run()
        weights.run()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-12, atol=1e-15)


def test_the_first_stage_has_no_i() -> None:
    model = nn.Linear(4, 4)
    out = model(torch.ones(2, 4))
    weights = backward_input([out], gradients=[torch.ones_like(out)], received=[], parameters=model.parameters())
    assert model.weight.grad is None
    weights.run()
    assert model.weight.grad is not None
    assert model.weight.grad.eq(2).all()


def test_unused_parameters_get_no_gradient() -> None:
    model, unused = nn.Linear(4, 4), nn.Linear(4, 4)
    frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
    x, other = torch.ones(2, 4, requires_grad=True), torch.ones(2, requires_grad=True)
    out = frozen(model(x))
    everything = [*model.parameters(), *unused.parameters(), *frozen.parameters()]
    backward_input([out], gradients=[torch.ones_like(out)], received=[x, other], parameters=everything).run()
    assert unused.weight.grad is None
    assert frozen.weight.grad is None
    assert other.grad is None
    assert x.grad is not None
    assert model.weight.grad is not None
