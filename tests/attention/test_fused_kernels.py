"""torch's fused kernels of CUDA are called as they have to be, and attention by them equals attention by formulas.

Without a GPU, tensors without values check the arguments against torch's own declarations. Stand-ins on the CPU check
the strides and fillings that the kernels of CUDA need, and compute by formulas."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwise.attention import Pattern, attend, causal, documents, full, fused_kernels, padding, tiled_attention, window
from meshwise.attention.fused_kernels import AttentionInput, fused_kernel

LENGTH, WIDTH = 75, 16
PLACES = torch.arange(LENGTH)
PATTERNS: dict[str, Pattern] = {
    "full": full(),
    "window": causal() & window(9),
    "packed": causal() & documents((PLACES > 40).long()[None]),
    "queries without keys": causal() & padding((PLACES > 5)[None]),
}
BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-11}
SHAPES = [(2, heads, LENGTH, WIDTH) for heads in (4, 2, 2, 4)]


def tensors(dtype: torch.dtype, *, device: str = "cpu") -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=draw, dtype=torch.float64).to(device, dtype) for shape in SHAPES]
    return [made[0].transpose(1, 2).contiguous().transpose(1, 2), *made[1:]]  # as a layer makes heads


def trained(given: list[Tensor], pattern: Pattern) -> list[Tensor]:
    q, k, v, do = given
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, pattern=pattern)
    return [out.detach(), *torch.autograd.grad(out, inputs, do)]


def check(dtype: torch.dtype, found: list[Tensor], exact: list[Tensor]) -> None:
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        assert float((ours.cpu().double() - theirs).abs().max() / theirs.abs().max()) < BOUNDS[dtype]


def by_formulas(dtype: torch.dtype, pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the attention of the same rounded tensors, by the plain formulas in float64."""
    with monkeypatch.context() as patched:
        patched.setattr(tiled_attention, "fused_kernel", lambda *_, **__: None)
        return trained([x.double() for x in tensors(dtype)], pattern)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [True, False])
def test_torch_declares_these_arguments(masked: bool, dtype: torch.dtype) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v, mask = (
            torch.empty(shape, dtype=dtype, device="cuda")
            for shape in ((2, 4, 37, WIDTH), (2, 4, 29, WIDTH), (2, 4, 29, WIDTH), (1, 1, 37, 29))
        )
        kernel = fused_kernel(q, value_features=WIDTH, masked=masked)
        assert kernel is not None
        given = AttentionInput(q, k, v, mask if masked else None, 0.25)
        o, lse = kernel.forward(given)
        gradients = kernel.backward(given, q, o, lse)
    for ours, like in zip((o, *gradients), (q, q, k, v), strict=True):
        assert (ours.shape, ours.dtype, ours.device.type) == (like.shape, dtype, "cuda")
    assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)


def formulas(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, ...]:
    """Return q, k, v and the scores in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    return q, k, v, q @ k.mT * scale + (0.0 if bias is None else bias.double())


def aligned(*given: Tensor) -> None:
    for x in given:
        assert x.stride(-1) == 1
        assert not any(place % 8 for place in (*x.stride()[:-1], x.storage_offset()))


def forward_of(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    aligned(q, k, v)
    *_, values, scores = formulas(q, k, v, bias, scale)
    return (scores.softmax(-1) @ values).to(q.dtype), scores.logsumexp(-1).float()  # NaN for a row of -inf


def backward_of(given: list[Tensor], bias: Tensor | None, lse: Tensor, scale: float) -> tuple[Tensor, ...]:
    do, q, k, v, o = given
    wide_q, wide_k, wide_v, scores = formulas(q, k, v, bias, scale)
    weights = (scores - lse.double().unsqueeze(-1)).exp()
    slope = weights * (do.double() @ wide_v.mT - (do.double() * o.double()).sum(-1, keepdim=True))
    made = slope @ wide_k * scale, slope.mT @ wide_q * scale, weights.mT @ do.double()
    return tuple(x.to(q.dtype) for x in made)


def flash(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Any, ...]:
    assert q.dtype in (torch.float16, torch.bfloat16)
    return (*forward_of(q, k, v, None, scale), None, None, q.size(2), k.size(2), None, None, None)


def flash_backward(*given: Any, scale: float) -> tuple[Tensor, ...]:
    *tensors, lse, _, _, queries, keys, dropout, is_causal, _, _ = given
    assert (queries, keys, dropout, is_causal) == (tensors[1].size(2), tensors[2].size(2), 0.0, False)
    assert lse.is_contiguous()
    aligned(*tensors)
    return backward_of(tensors, None, lse, scale)


def checked_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    if bias is not None:
        assert (bias.shape, bias.dtype) == ((*q.shape[:3], k.size(2)), q.dtype)
        assert bias.stride(-1) == 1
        assert not any(stride % 16 for stride in bias.stride()[:-1])


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_lse: bool, *, scale: float
) -> tuple[Tensor, ...]:
    assert compute_lse
    checked_bias(bias, q, k)
    o, lse = forward_of(q, k, v, bias, scale)
    return o, torch.nn.functional.pad(lse, (0, -lse.size(-1) % 32), value=math.inf), lse, lse


def efficient_backward(*given: Any, scale: float) -> tuple[Tensor | None, ...]:
    do, q, k, v, bias, o, lse, _, _, dropout, asked, *_ = given
    assert (dropout, asked) == (0.0, [True, True, True, False])
    checked_bias(bias, q, k)
    aligned(do, q, k, v)
    assert o.transpose(1, 2).is_contiguous()
    assert lse.is_contiguous()
    assert lse.size(-1) % 32 == 0
    assert bool((lse[..., q.size(2) :] == math.inf).all())
    return (*backward_of([do, q, k, v, o], bias, lse[..., : q.size(2)], scale), None)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the CPU's tensors take the kernels of CUDA, in small tiles; return the names of called kernels."""
    called = []

    def noted(name: str, run: Any) -> Any:
        def noting(*given: Any, **named: Any) -> Any:
            called.append(name)
            return run(*given, **named)

        return noting

    def chosen(q: Tensor, **given: Any) -> Any:
        on_cuda = SimpleNamespace(size=q.size, dtype=q.dtype, device=torch.device("cuda"))
        return fused_kernel(on_cuda, **given)  # type: ignore[arg-type]

    names = {
        "flash_attention": flash,
        "flash_attention_backward": flash_backward,
        "efficient_attention": efficient,
        "efficient_attention_backward": efficient_backward,
    }
    operators = {f"_scaled_dot_product_{name}": noted(name, run) for name, run in names.items()}
    monkeypatch.setattr(fused_kernels, "_aten", SimpleNamespace(**operators))
    monkeypatch.setattr(tiled_attention, "fused_kernel", chosen)
    monkeypatch.setattr(tiled_attention, "CPU_TILE", 16)
    return called


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_kernels_get_what_they_need(
    pattern: str, dtype: torch.dtype, stand_ins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(tensors(dtype), PATTERNS[pattern])
    half = dtype in (torch.float16, torch.bfloat16)
    expected = {"flash_attention"} if half and pattern in ("full", "packed") else set()
    expected |= {"efficient_attention"} if dtype != torch.float64 and (not half or pattern != "full") else set()
    expected |= {"flash_attention"} if half and pattern == "queries without keys" else set()
    assert {name.removesuffix("_backward") for name in stand_ins} == expected
    check(dtype, found, by_formulas(dtype, PATTERNS[pattern], monkeypatch))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_kernels_of_a_gpu_equal_the_formulas(
    pattern: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled_attention, "DEVICE_TILE", 16)
    found = trained(tensors(dtype, device="cuda"), PATTERNS[pattern])
    check(dtype, found, by_formulas(dtype, PATTERNS[pattern], monkeypatch))
