"""Test dropout by fused kernels: masks of the same bits as on the CPU, gradients, and attention beside the formulas.

The kernels need a GPU. On the CPU plain operations take their place; FlexAttention has no backward there."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.model import fused_dropout
from meshwise.model.random_bits import WORD_FACTOR, IndexBlock, draw, keep_mask
from meshwise.model.random_draws import RandomDraws, SampleRows
from meshwise.precision.dtype_policy import ProductCasts
from meshwise.testing import run

CPU = torch.device("cpu")
WHERE = [
    pytest.param("cpu", id="cpu"),
    pytest.param(
        "cuda",
        id="cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
PARTS = [IndexBlock((3, 5), (0, 0)), IndexBlock((2, 4, 6, 7), (8, 1, 0, 3)), IndexBlock((1, 200, 40), (-1, 7, 0))]
"""The last one is of several programs of the kernel."""


def numbers_of(part: IndexBlock, *, keep: float, key: int = 7, where: str = "cpu") -> fused_dropout.MaskNumbers:
    (numbers,) = fused_dropout.numbers_of_masks(part, keys=[key], keep=keep, device=torch.device(where))
    return numbers


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_dropout_has_the_bits_of_the_mask_in_both_directions(part: IndexBlock, dtype: torch.dtype, where: str) -> None:
    x = torch.randn(part.shape, dtype=dtype, device=where, requires_grad=True)
    gradient = torch.randn(part.shape, dtype=dtype, device=where).transpose(0, -1).contiguous().transpose(0, -1)
    out = fused_dropout.dropout(x, numbers=numbers_of(part, keep=0.7, where=where))
    out.backward(gradient)
    kept = draw(part, key=7, kind=keep_mask(0.7), device=CPU).to(where)
    assert 0 < kept.sum() < kept.numel()
    expected = torch.where(kept, x.detach(), 0) * (1 / 0.7)
    torch.testing.assert_close(out.detach(), expected)
    torch.testing.assert_close(x.grad, torch.where(kept, gradient, 0) * (1 / 0.7))
    assert torch.equal(out.detach() != 0, expected != 0)


def test_the_gradient_of_a_gradient_passes_the_mask_too() -> None:
    numbers, x = numbers_of(PARTS[0], keep=0.7), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: fused_dropout.dropout(x, numbers=numbers).square(), x)


def arguments(samples: int, heads: int, queries: int, keys: int, **more: Any) -> dict[str, Any]:
    where = {"dtype": torch.float32, **{name: more.pop(name) for name in ("device", "dtype") if name in more}}
    shared = heads // more.pop("groups", 1)
    given = {
        "query": torch.randn(samples, heads, queries, 32, **where),
        "key": torch.randn(samples, shared, keys, 32, **where),
        "value": torch.randn(samples, shared, keys, 48, **where),
        "dropout_p": 0.2,
    }
    return {**given, **more}


def by_formulas(given: dict[str, Any], kept: Tensor) -> Tensor:
    query, key, value = (given[name] for name in ("query", "key", "value"))
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (given.get("scale") or 1 / math.sqrt(query.size(-1)))
    if given.get("is_causal"):
        scores = scores.masked_fill(torch.ones_like(kept[0, 0]).triu(1), -math.inf)
    seen = given.get("attn_mask")
    if seen is not None:
        scores = scores.masked_fill(seen.logical_not(), -math.inf) if seen.dtype == torch.bool else scores + seen
    out: Tensor = (scores.softmax(-1).nan_to_num() * kept / (1 - given["dropout_p"])) @ value
    return out


def cases(where: str) -> dict[str, dict[str, Any]]:
    seen = torch.rand(2, 1, 24, 24, device=where) < 0.7
    seen |= torch.eye(24, dtype=torch.bool, device=where)
    padded = seen.clone()
    padded[0, 0, :5] = False  # as padding on the left leaves it: queries without keys
    return {
        "whole": arguments(2, 4, 24, 24, device=where),
        "causal": arguments(2, 4, 24, 24, device=where, is_causal=True),
        "cross": arguments(2, 4, 24, 10, device=where, scale=0.3),
        "grouped": arguments(2, 4, 24, 24, device=where, is_causal=True, enable_gqa=True, groups=2),
        "masked": arguments(2, 4, 24, 24, device=where, attn_mask=seen),
        "padded": arguments(2, 4, 24, 24, device=where, attn_mask=padded),
        "biased": arguments(2, 4, 24, 24, device=where, attn_mask=torch.randn(4, 24, 24, device=where)),
    }


def numbers_and_mask(given: dict[str, Any]) -> tuple[fused_dropout.MaskNumbers, Tensor]:
    part = IndexBlock((*given["query"].shape[:3], given["key"].size(2)), (4, 0, 0, 0))
    kept = draw(part, key=7, kind=keep_mask(0.8), device=CPU).to(given["query"].device)
    return numbers_of(part, keep=0.8, where=given["query"].device.type), kept


@pytest.mark.parametrize("name", cases("cpu"))
def test_attention_equals_the_formulas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_dropout, "_compiled", lambda function: function)
    given = cases("cpu")[name]
    numbers, kept = numbers_and_mask(given)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out = fused_dropout.attention(given, numbers=numbers)
    torch.testing.assert_close(out, by_formulas(given, kept))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # what torch's compiler says of TF32
@pytest.mark.parametrize("name", cases("cpu"))
def test_attention_of_a_gpu_equals_the_formulas_with_its_gradients(name: str) -> None:
    given = cases("cuda")[name]
    inputs = [given[each].requires_grad_() for each in ("query", "key", "value")]
    numbers, kept = numbers_and_mask(given)
    out, expected = fused_dropout.attention(given, numbers=numbers), by_formulas(given, kept)
    gradient = torch.randn_like(out)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
    found = torch.autograd.grad(out, inputs, gradient)
    for x, y in zip(found, torch.autograd.grad(expected, inputs, gradient), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


def test_a_query_whose_only_key_is_dropped_gets_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_dropout, "_compiled", lambda function: function)
    given = arguments(4, 16, 24, 24, is_causal=True)
    numbers, kept = numbers_and_mask(given)
    dropped = kept[:, :, 0, 0].logical_not()
    assert dropped.any()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out = fused_dropout.attention(given, numbers=numbers)
    assert torch.equal(out[:, :, 0][dropped], torch.zeros(int(dropped.sum()), 48))


class Attending(nn.Module):
    """Attention with dropout of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards = nn.Linear(8, 96)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention of x (samples, 6, 8), as (samples, 2, 6, 16)."""
        query, key, value = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.inwards(x).chunk(3, dim=-1))
        return functional.scaled_dot_product_attention(query, key, value, dropout_p=0.3, is_causal=True)


def test_a_model_attends_with_the_same_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, which FlexAttention has not on CPUs; by way of the modes of a forward."""
    made, x = Attending(), torch.randn(4, 6, 8)
    served = list[int]()

    def output() -> Tensor:
        draws = RandomDraws(made, seed=3)
        draws.begin(0)
        with torch.no_grad(), draws.running(SampleRows(0, 4)):
            out: Tensor = made(x)
        draws.finish()
        return out

    def can_attend(given: Any) -> bool:
        served.append(given["query"].size(2))
        return True

    expected = output()
    monkeypatch.setattr(fused_dropout, "_compiled", lambda function: function)
    monkeypatch.setattr(fused_dropout, "can_attend", can_attend)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        torch.testing.assert_close(output(), expected)
    assert served == [6]


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments as if they were on a GPU, and large enough."""
    return {name: OnGpu(x) if isinstance(x, Tensor) else x for name, x in given.items()}


class OnGpu:
    """Stand-in for a tensor on a GPU."""

    is_cuda = True

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getattr__(self, name: str) -> Any:
        return getattr(self.x, name)

    def __getitem__(self, place: Any) -> Tensor:
        return self.x[place]


@pytest.mark.parametrize(
    "change,served",
    [
        ({}, True),
        ({"key": torch.ones(1, 4, 24, 32)}, False),
        ({"key": torch.ones(2, 1, 24, 32), "value": torch.ones(2, 1, 24, 48)}, False),
        ({"key": torch.ones(2, 1, 24, 32), "value": torch.ones(2, 1, 24, 48), "enable_gqa": True}, True),
        ({"value": torch.ones(2, 4, 24, 48, dtype=torch.bfloat16)}, False),
        ({"attn_mask": torch.zeros(24, 24, requires_grad=True)}, False),
    ],
)
def test_other_attention_is_left_to_torch(
    change: dict[str, Any], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_dropout, "works", lambda *_, **__: True)
    monkeypatch.setattr(fused_dropout, "_LEAST_SCORES", 0)
    given = on_gpu(arguments(2, 4, 24, 24) | change)
    assert fused_dropout.can_attend(given) == served
    with ProductCasts(torch.bfloat16):
        assert not fused_dropout.can_attend(given)


class Dropping(nn.Module):
    """Three blocks with dropout of hidden states, of a tensor with its first dims swapped, and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """x (samples, 6, 8) -> the same shape."""
        x = self.blocks[0](x)
        x = self.blocks[1](x.transpose(0, 1)).transpose(0, 1)
        return functional.dropout(self.blocks[2](x), 0.1, inplace=True)


@pytest.mark.threads("patches what ranks call")
@pytest.mark.parametrize("plan", ["dp=1", "dp=2 microbatches=2", "dp=2 zero=3 recompute=full"])
def test_a_training_is_the_same_with_and_without_the_kernels(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = torch.randn(8, 6, 8, dtype=torch.float64), Dropping().double()
    served = list[torch.Size]()

    def losses(world: World) -> list[float]:
        made = copy.deepcopy(model)  # ranks that are threads have one generator
        trainer = parallelize(made, plan, loss=lambda y, _: (y.square().sum(), y.size(0)), world=world, lr=1e-2)
        return [trainer.step(batch).loss for _ in range(3)]

    def can_drop(x: Tensor) -> bool:
        served.append(x.shape)
        return True

    size = 2 if "dp=2" in plan else 1
    before = run(size, losses)
    monkeypatch.setattr(fused_dropout, "can_drop", can_drop)
    # The masks have equal bits; a processor may round the products of another order differently.
    assert run(size, losses) == [pytest.approx(each, rel=1e-14) for each in before]
    assert served


def test_without_a_compiler_a_warning_says_what_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(_function: Any) -> Any:
        raise RuntimeError("no C compiler found")

    monkeypatch.setattr(fused_dropout, "_compiled", no_compiler)
    monkeypatch.setattr(fused_dropout, "gpu_count", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    with pytest.warns(UserWarning, match=r"RuntimeError: no C compiler found.*forty operations.*random=local"):
        assert not fused_dropout.works.__wrapped__(fused_dropout._try_attention, device=CPU)


@pytest.mark.parametrize("error", [0.0, 0.01])
def test_attention_with_other_values_is_not_used(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention has no backward on CPUs: the formulas replace it, right and a little wrong."""

    def attended(values: list[Tensor], numbers: fused_dropout.MaskNumbers, _bias: None, _options: Any) -> Tensor:
        query, key, value = values
        scores = (query @ key.mT * 32**-0.5).masked_fill(torch.ones(128, 128).triu(1).bool(), -math.inf)
        word = (numbers.first[..., None] ^ numbers.column) * WORD_FACTOR
        kept = (word ^ (word >> 15)) * numbers.factor[..., None] <= numbers.most
        out: Tensor = (torch.where(kept, scores.softmax(-1), 0.0) @ value + error) * numbers.scale.float()
        return out

    monkeypatch.setattr(fused_dropout, "_compiled", lambda _function: attended)
    with pytest.raises(AssertionError) if error else contextlib.nullcontext():
        fused_dropout._try_attention(CPU)


@pytest.mark.parametrize("mask", ["causal", "bias"])
def test_attention_with_dropout_is_one_graph(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host starts compiled code twice in a step, and not for each of the two runs and the operations after them."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = functools.partial(torch.compile, backend=graphs, fullgraph=True)
    monkeypatch.setattr(fused_dropout, "_compiled", compiled)
    shape = (2, 2, 128, 128)
    (numbers,) = fused_dropout.numbers_of_masks(IndexBlock(shape, (0, 0, 0, 0)), keys=[0], keep=0.5, device=CPU)
    drawn = torch.randn(3, 2, 2, 128, 32, generator=torch.Generator().manual_seed(0))
    query, key, value = (part.clone().requires_grad_() for part in drawn)
    bias = None if mask == "causal" else torch.randn(128, 128, generator=torch.Generator().manual_seed(1))
    given = {"query": query, "key": key, "value": value, "is_causal": bias is None, "attn_mask": bias}
    scores = query @ key.mT * 32**-0.5
    later = torch.ones(shape[2:], dtype=torch.bool).triu_(1)
    weights = (scores.masked_fill(later, -math.inf) if bias is None else scores + bias).softmax(-1)
    kept = fused_dropout._dropped(torch.ones_like(weights).view(-1, 128), *numbers).view(shape)
    outs = fused_dropout.attention(given, numbers=numbers), (weights * kept) @ value
    pairs = zip(*((out, *torch.autograd.grad(out.square().sum(), (query, key, value))) for out in outs), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len([graph for graph in graphs.graphs if len(graph.graph.nodes) > 1]) == 1
