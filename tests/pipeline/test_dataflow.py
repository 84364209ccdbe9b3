"""Outputs that later stages depend on cross a cut, by whatever way; side effects that they need are refused."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwise.pipeline.cut.model_cut import CutOptions, CutRequest, ModelCut, cut_model
from meshwise.pipeline.cut.probe_result import CutError
from pipeline.oracle import is_the_model
from pipeline.training import WIDTH, linears, made, numbers, squares


class Model(nn.Module):
    """An embedding and four layers, called as a test says; a stage begins at the last layer but one."""

    def __init__(self, body: Callable[[Any, Any, Tensor], Any], *layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers or linears())
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self.embedding, self.layers, x)


def example(model: nn.Module) -> Tensor:
    x = numbers(4)[0]
    return squares(model(x.clone()), x)[0]


def cut(model: nn.Module, *, at: str = "layers.2", bare: bool = False) -> ModelCut:
    """In two; `bare`: of a model without values."""
    cut_from = copy.deepcopy(model).to("meta") if bare else model
    return cut_model(cut_from, stages=2, call=example, request=CutRequest(options=CutOptions(at=(at,), how="blocks")))


def through(layers: Any, x: Any, *args: Any) -> Any:
    for layer in layers:
        x = layer(x, *args)
    return x


def detached(embedding: Any, layers: Any, x: Tensor) -> Any:
    x = embedding(x)
    return through(layers, x) * x.detach()


def without_graph(embedding: Any, layers: Any, x: Tensor) -> Any:
    with torch.no_grad():
        x = embedding(x)
        target = layers[0](x)
    return through(layers[1:], x) - target


def chosen(embedding: Any, layers: Any, x: Tensor) -> Any:
    x = embedding(x)
    number = x.argmax(-1, keepdim=True)
    return through(layers, x) * (number + 1) * torch.where(x > 0, 2.0, 3.0)


def read(embedding: Any, layers: Any, x: Tensor) -> Any:
    first = embedding(x)
    return through(layers, first) * (2.0 if bool((first.detach().square().sum() > 0).item()) else 5.0)


READS: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda x: len([row for row in x.tolist() if row[0] > 0]),
    "numpy": lambda x: x.detach().numpy().mean(),
    "asarray": lambda x: np.asarray(x.detach()).mean(),
    "float": lambda x: float(x.detach().mean()),
    "a shape that values decide": lambda x: x[x > 0].shape[0],
}


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("how", READS)
def test_an_output_crosses_when_python_reads_a_number_from_it(how: str, bare: bool) -> None:
    def reading(embedding: Any, layers: Any, x: Tensor) -> Any:
        first = embedding(x)
        return through(layers, first) * (2.0 + READS[how](first))

    model = made(lambda: Model(reading))
    is_the_model(model, example, cut(model, bare=bare))


def cloned_before(embedding: Any, layers: Any, x: Tensor) -> Any:
    x = embedding(x)
    kept = x.clone()
    return through(layers, x) + kept


class Numbered(nn.Module):
    """Returns an integer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out: Tensor = self.linear(x)
        return out, out.argmax(-1, keepdim=True)


def numbered(embedding: Any, layers: Any, x: Tensor) -> Any:
    x, number = layers[0](embedding(x))
    return through(layers[1:], x) * number


class InPlace(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.mul_(2))
        return out


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(
    "body, first",
    [
        (detached, linears),
        (without_graph, linears),
        (chosen, linears),
        (read, linears),
        (numbered, lambda: [Numbered()]),
        (cloned_before, lambda: [InPlace()]),
    ],
)
def test_values_outside_of_the_autograd_graph_cross(
    body: Any, first: Callable[[], list[nn.Module]], bare: bool
) -> None:
    model = made(lambda: Model(body, first()[0], *linears(3)))
    is_the_model(model, example, cut(model, bare=bare))


class Kept(nn.Module):
    """Puts something into an attribute, a list, a mapping or a tensor that it is given."""

    def __init__(self, into: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.into, self.calls = into, 0
        self.kept: Any = torch.zeros(())

    def forward(self, x: Tensor, there: Any) -> Tensor:
        out: Tensor = self.linear(x)
        self.calls += 1
        if self.into == "number in an attribute":
            self.kept = self.calls * 2
        elif self.into == "attribute":
            self.kept = out.square().sum()
        elif self.into == "list":
            there.append(out.square().sum())
        elif self.into == "mapping":
            there["sum"] = there["sum"] + out.detach().square().sum()
        else:
            there += out.detach()
        return out


def collecting(embedding: Any, layers: Any, x: Tensor) -> Any:
    into = layers[0].into
    there: Any = {"list": [], "mapping": {"sum": torch.zeros(())}, "tensor": torch.zeros_like(x)}.get(into.split()[-1])
    x = through(layers, embedding(x), there)
    if into.endswith("attribute"):
        return x + sum(layer.kept for layer in layers)
    return x + (sum(there) if isinstance(there, list) else there["sum"] if isinstance(there, dict) else there)


INTO = ["attribute", "list", "mapping", "tensor"]


def changed_and_used(embedding: Any, layers: Any, x: Tensor) -> Any:
    x = embedding(x)
    return through(layers, x) + x


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("into", INTO)
def test_a_side_effect_that_a_later_stage_needs_is_refused(into: str, bare: bool) -> None:
    model = made(lambda: Model(collecting, *(Kept(into) for _ in range(4))))
    with pytest.raises(CutError, match=r"cannot begin at layers.2: .* needs a side effect of layers.[01]"):
        cut(model, bare=bare)


@pytest.mark.parametrize("bare", [False, True])
def test_an_input_changed_in_place_that_a_later_stage_needs_is_refused(bare: bool) -> None:
    model = made(lambda: Model(changed_and_used, InPlace(), *linears(3)))
    with pytest.raises(CutError, match=r"layers.2: the result needs a side effect of layers.0"):
        cut(model, bare=bare)
    is_the_model(model, example, cut(model, at="layers.0", bare=bare))


class Looks(nn.Module):
    """What it computes depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out * 2 if out.sum().item() > 0 else out


def test_a_piece_that_looks_at_values_is_cut_with_them_and_refused_without() -> None:
    def plain(embedding: Any, layers: Any, x: Tensor) -> Any:
        return through(layers, embedding(x))

    model = made(lambda: Model(plain, Looks(), *linears(3)))
    is_the_model(model, example, cut(model))
    with pytest.raises(CutError, match=r"(?s)layers.0 cannot run without values: .*\.item.* Give the module itself"):
        cut(model, bare=True)


def hooked(embedding: Any, layers: Any, x: Tensor) -> Any:
    """As the models of transformers collect what their attention gives."""
    found: list[Tensor] = []
    hooks = [layer[0].register_forward_hook(lambda _layer, _given, out: found.append(out.sum())) for layer in layers]
    x = through(layers, embedding(x))
    for hook in hooks:
        hook.remove()
    return x + sum(found)


@pytest.mark.parametrize("bare", [False, True])
def test_values_that_hooks_collect_inside_of_pieces_are_refused(bare: bool) -> None:
    with pytest.raises(CutError, match=r"layers.2: the result needs a side effect of layers.0"):
        cut(made(lambda: Model(hooked)), bare=bare)


def test_attributes_that_only_the_piece_reads_are_allowed() -> None:
    def alone(embedding: Any, layers: Any, x: Tensor) -> Any:
        x = embedding(x)
        for layer in layers:
            x = layer(x, [])
        return x

    model = made(lambda: Model(alone, *(Kept("number in an attribute") for _ in range(4))))
    is_the_model(model, example, cut(model))


class Level(nn.Module):
    """Has a buffer, and a method that changes it; nobody calls it."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(()))

    def update(self, x: Tensor) -> None:
        with torch.no_grad():
            self.level.mul_(0.5).add_(x.abs().mean())


def test_a_buffer_that_a_method_changes_outside_of_pieces_is_refused() -> None:
    def levelled(embedding: Any, layers: Any, x: Tensor) -> Any:
        x = embedding(x)
        for layer in layers[:-1]:
            x = layer(x)
        layers[-1].update(x)
        return x / layers[-1].level

    build = lambda: Model(levelled, *linears(), Level())  # noqa: E731
    with pytest.raises(CutError, match=r"the model changes its buffer layers.4.level outside of its pieces"):
        cut_model(made(build), stages=3, call=example, request=CutRequest(options=CutOptions(how="blocks")))


def test_a_piece_inside_of_a_reentrant_checkpoint_is_refused() -> None:
    def hiding(embedding: Any, layers: Any, x: Tensor) -> Any:
        x = embedding(x)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x

    with pytest.raises(CutError, match=r"layers.0 is called in a reentrant checkpoint .* use_reentrant=False"):
        cut(made(lambda: Model(hiding)))


@pytest.mark.parametrize("bare", [False, True])
def test_tensors_of_a_watched_run_are_freed(bare: bool) -> None:
    seen: list[weakref.ref[Tensor]] = []

    def noted(embedding: Any, layers: Any, x: Tensor) -> Any:
        for layer in (embedding, *layers):
            x = layer(x)
            seen.append(weakref.ref(x))
        return x

    model = Model(noted).double()
    gc.disable()
    try:
        cut(model, bare=bare)
        assert seen
        assert not [found for found in seen if found() is not None]
    finally:
        gc.enable()
