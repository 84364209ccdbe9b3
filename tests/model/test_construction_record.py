"""Replayed values equal the values that the constructor itself would have computed."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwise.model.deferred_init import ParameterSource, build_with_values


def holder(**tensors: Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def count(*shape: int) -> Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)


CASES: dict[str, Callable[[], nn.Module]] = {}


def case(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    CASES[build.__name__] = build
    return build


@case
def factories() -> nn.Module:
    return holder(
        linspace=torch.linspace(0, 1, 5),
        eye=torch.eye(3),
        full=torch.full((2,), 7),
        like=torch.ones_like(torch.zeros(2, 2, dtype=torch.int16)),
        tensor=torch.tensor([1.5, 2.5]),
        numpy=torch.from_numpy(np.arange(4.0)),
        legacy=torch.Tensor([1, 2, 3]),
        triangle=torch.tril(torch.ones(3, 3)).view(1, 3, 3),
        angles=torch.outer(torch.arange(4), 1.0 / (10 ** (torch.arange(0, 6, 2) / 6))).cos(),
        window=torch.hann_window(8),
    )


@case
def complex_numbers() -> nn.Module:
    rotation = torch.polar(torch.ones(4), torch.linspace(0, 3, 4))
    return holder(rotation=rotation, conjugate=rotation.conj(), imaginary=rotation.conj().imag + 0.0)


@case
def writes_through_views() -> nn.Module:
    x = count(4, 6)
    x[1:3, ::2].zero_()
    x[0].fill_(9)
    x.t()[2] += 1
    x.view(-1)[-1] = -1.0
    x[x > 20] = 0.5
    x[[0, 3], [1, 1]] = torch.tensor([100.0, 200.0])
    x[np.array([1, 2]), 2:4] = count(2, 2)
    x[3, range(2)] = x.new_tensor([-5, -6])
    x[[True, False, False, False]] -= 1
    x.diagonal().mul_(3)
    y = count(3, 2)
    y.t_()
    return holder(x=x, row=x[1], column=x[:, 1], picked=x[[1, 2, 1]], y=y, transposed=count(2, 3).t())


@case
def copies() -> nn.Module:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    nn.init.constant_(a.weight, 2.0)
    nn.init.eye_(b.weight)
    a.weight.data[0].copy_(b.weight.data[1])
    b.weight.data.copy_(b.weight.data.flip(0) * 2)
    b.weight.data.copy_(b.weight.data.view(3, 3))
    a.bias.data = torch.ones(3)
    b.bias = nn.Parameter(a.bias.detach().clone() + 1)
    return nn.Sequential(a, b, copy.deepcopy(a), copy.deepcopy(holder(x=count(2))))


@case
def types() -> nn.Module:
    layers = nn.Sequential(*(nn.Linear(3, 2) for _ in range(4)))
    for parameter in layers.parameters():
        nn.init.constant_(parameter, 1 / 3)
    layers[0].double()
    layers[1].to(torch.bfloat16).requires_grad_(False)
    layers[2].half()
    layers[3].weight.data = layers[3].weight.data.to(torch.float64)
    return layers


@case
def default_type() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return holder(third=torch.arange(9) / 3, full=torch.full((2,), 1 / 3), root=torch.arange(5).sqrt())
    finally:
        torch.set_default_dtype(before)


@case
def devices() -> nn.Module:
    with torch.device("cpu"):
        made = torch.ones(2)
    return holder(made=made, explicit=torch.zeros(2, device="cpu"), follows=torch.arange(3, device=made.device))


@case
def control_flow_on_values() -> nn.Module:
    rates = [rate.item() for rate in torch.linspace(0, 0.5, 5)]
    x = count(6)
    if x.sum() > 20 and not torch.equal(x, x + 1) and torch.allclose(x, x.clone()):
        x.neg_()
    places = (x < -3).nonzero()
    return holder(
        rates=torch.tensor(rates), x=x, places=places, kept=x[x < -2], distinct=torch.unique(torch.tensor([3, 1, 3]))
    )


@case
def reading_values() -> nn.Module:
    x = count(3)
    listed, array = x.tolist(), (x * 2).numpy()
    text = f"{x.mean():.2f} {x}"
    return holder(
        listed=torch.tensor(listed), array=torch.from_numpy(array), read=torch.tensor([len(text), len(str(x))])
    )


@case
def looking_at_the_device() -> nn.Module:
    x = torch.zeros(2)
    if x.device.type == "cpu" and x.is_cpu and not x.is_meta:
        x += 1
    return holder(x=x)


@case
def loading_a_checkpoint() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.load_state_dict({"weight": count(2, 2), "bias": torch.from_numpy(np.ones(2, dtype=np.float32))})
    return nn.Sequential(layer, nn.Embedding.from_pretrained(count(3, 2)))


@case
def layouts() -> nn.Module:
    image = nn.Conv2d(2, 3, 2, bias=False)
    nn.init.dirac_(image.weight)
    image.weight.data = image.weight.data.to(memory_format=torch.channels_last)
    return nn.Sequential(image, holder(strided=count(3, 4).t().clone()))


@case
def parts_of_one_memory() -> nn.Module:
    query, key = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    query.weight, key.weight = (nn.Parameter(part) for part in count(4, 2).chunk(2))
    return nn.Sequential(query, key)


@case
def norms() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(3), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(3))


@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_replayed_values_are_those_of_the_constructor(build: Callable[[], nn.Module]) -> None:
    expected = build()
    source = build_with_values(build, seed=0)
    for name, tensor in (*expected.named_parameters(), *expected.named_buffers()):
        full = source.full(name)
        assert (full.dtype, full.device.type) == (tensor.dtype, "cpu"), name
        assert torch.equal(full, tensor), name
        assert full.requires_grad is False
    assert [p.requires_grad for p in expected.parameters()] == [p.requires_grad for p in source.module.parameters()]
    source.fill_buffers()
    for (name, tensor), ours in zip(expected.named_buffers(), source.module.buffers(), strict=True):
        assert torch.equal(ours, tensor), name


@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_returned_values_have_their_own_memory(build: Callable[[], nn.Module]) -> None:
    source = build_with_values(build, seed=0)
    for name, _ in (*source.module.named_parameters(), *source.module.named_buffers()):
        first = source.full(name)
        assert first.untyped_storage().nbytes() == first.nbytes, name
        kept = first.clone()
        first.zero_()
        assert torch.equal(source.full(name), kept), name


def test_copies_of_random_values_agree_in_any_order_of_requests() -> None:
    def build() -> nn.Module:
        one, two, pad = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(4, 3, padding_idx=2)
        two.weight.data.copy_(one.weight)
        one.bias.data.copy_(two.bias * 2)
        return nn.Sequential(one, two, pad, copy.deepcopy(one))

    for names in (["0", "1", "3"], ["3", "1", "0"]):
        source = build_with_values(build, seed=3)
        weights = {name: source.full(f"{name}.weight") for name in names}
        assert torch.equal(weights["0"], weights["1"])
        assert torch.equal(weights["0"], weights["3"])
        assert torch.equal(source.full("0.bias"), source.full("1.bias") * 2)
        assert source.full("2.weight").any(dim=1).tolist() == [True, True, False, True]


def test_overwritten_values_are_not_computed() -> None:
    def build(*, twice: bool) -> nn.Module:
        layer = nn.Linear(64, 64, bias=False) if twice else nn.utils.skip_init(nn.Linear, 64, 64, bias=False)
        nn.init.normal_(layer.weight)
        return layer

    once, twice = (build_with_values(partial(build, twice=twice), seed=3) for twice in (False, True))
    assert torch.equal(once.full("weight"), twice.full("weight")), "the first draw takes part in nothing"


def test_random_values_that_the_constructor_read_are_the_final_values() -> None:
    seen = []

    def build() -> nn.Module:
        x = torch.rand(5)
        seen.append(x.tolist())
        while x.max() > 0.5:
            x = torch.where(x > 0.5, torch.rand(5), x)
        return holder(x=x, y=torch.rand(5))

    sources = [build_with_values(build, seed=3) for _ in range(2)]
    assert seen[0] == seen[1]
    assert sources[0].full("x").max() <= 0.5
    assert torch.equal(sources[0].full("x"), sources[1].full("x"))
    assert torch.equal(sources[0].full("y"), sources[1].full("y"))


class Plain(nn.Module):
    """Holds tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.mask = torch.tril(torch.ones(2, 2))
        self.tables: dict[str, Any] = {"a": [torch.arange(3), 5], "b": torch.zeros(1)}
        self.register_buffer("again", self.mask)
        self.noise = torch.rand(4)
        self.parameters_too = [self.weight]


def test_tensors_in_plain_attributes_get_their_values() -> None:
    source = build_with_values(Plain, seed=0)
    source.fill_buffers()
    module = source.module
    assert isinstance(module, Plain)
    assert torch.equal(module.mask, torch.tril(torch.ones(2, 2)))
    assert module.again is module.mask
    assert torch.equal(module.tables["a"][0], torch.arange(3))
    assert (module.tables["a"][1], module.tables["b"].device.type) == (5, "cpu")
    assert torch.equal(module.noise, source.full("noise"))
    assert module.parameters_too[0] is module.weight


def test_a_construction_that_fails_leaves_nothing_behind() -> None:
    def build() -> nn.Module:
        torch.zeros(3)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        build_with_values(build, seed=0)
    assert torch.zeros(3).tolist() == [0.0, 0.0, 0.0]


def test_random_operations_that_take_no_generator_are_refused() -> None:
    with pytest.raises(ValueError, match=r"native_dropout.default, which takes no generator"):
        build_with_values(lambda: holder(x=torch.native_dropout(torch.ones(3), 0.5, True)[0]), seed=0)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_values_do_not_depend_on_the_default_type_at_replay(build: Callable[[], nn.Module]) -> None:
    source = build_with_values(build, seed=0)

    def values(source: ParameterSource) -> list[Tensor]:
        return [source.full(n) for n, _ in (*source.module.named_parameters(), *source.module.named_buffers())]

    expected = values(source)
    with default_dtype(torch.float64):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(values(source), expected, strict=True))
