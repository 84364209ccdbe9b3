"""Forms of published vision, speech and diffusion models are one process's under a plan, or refused with what works."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grid import Grid
from meshwise.engine.parallelize import Options
from meshwise.plan import PlanError
from meshwise.verify import verify
from tensor.plain import shown


def vectors(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(*sizes, generator=generator), torch.randn(sizes[0], 4, generator=generator)) for _ in range(3)]


def squares(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), len(output)


class VitAttention(nn.Module):
    """timm before 0.9, DeiT, DINO, MAE, Swin: C of the input makes the heads, and x is replaced at the end."""

    def __init__(self, width: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        x = ((q @ k.transpose(-2, -1)).softmax(dim=-1) @ v).transpose(1, 2).reshape([B, N, C])
        x = self.proj(x)
        return x  # noqa: RET504


class GatedAttention(VitAttention):
    """timm: without a gate, the attribute is None."""

    gate: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        x = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x if gate is None else x * gate)  # type: ignore[no-any-return]


class XcitAttention(VitAttention):
    """XCiT: both branches replace x."""

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 4, 1)
        if self.training:
            x = functional.scaled_dot_product_attention(q, k, v, scale=1.0)
        else:
            x = (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        x = x.permute(0, 3, 1, 2).reshape(B, N, C)
        return self.proj(x)  # type: ignore[no-any-return]


class ClassAttention(nn.Module):
    """CaiT: the number of heads divides C, but the queries are of one token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q = self.q(x[:, 0]).unsqueeze(1).reshape(B, 1, self.num_heads, C // self.num_heads).transpose(1, 2)
        k, v = (one(x).reshape(B, N, self.num_heads, -1).transpose(1, 2) for one in (self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, 1, -1)
        return self.proj(mixed).expand(B, N, C)  # type: ignore[no-any-return]


class LearnedTemperature(nn.Module):
    """Attention of vit-pytorch for small data sets: every head is divided by one learned number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 4
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, dim=-1))
        mixed = (q @ k.transpose(-1, -2) * self.temperature.exp()).softmax(-1) @ v
        return self.to_out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Vit(nn.Module):
    """Blocks as pairs of an attention and an MLP in lists, as in vit-pytorch."""

    def __init__(self, kind: type[nn.Module], depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([kind(16), FeedForward(16)]) for _ in range(depth)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in self.layers:  # type: ignore[misc]
            x = x + attention(x)  # type: ignore[has-type]
            x = x + mlp(x)  # type: ignore[has-type]
        return self.head(x.mean(1))  # type: ignore[no-any-return]


@pytest.mark.grid(
    Grid(
        {"kind": (VitAttention, GatedAttention, XcitAttention), "plan": ("tp=2", "tp=4", "tp=2 sequence_parallel=1")},
        strength=1,
    )
)
def test_an_attention_that_divides_the_width_of_its_input_by_its_heads_is_split(kind: Any, plan: str) -> None:
    assert verify(lambda: Vit(kind), squares, vectors(4, 6, 16), plan, lr=1e-2).ok


def test_a_number_for_all_heads_keeps_its_attention_whole() -> None:
    def check(rules: dict[str, str]) -> bool:
        options = Options(tensor_rules=rules)
        return verify(lambda: Vit(LearnedTemperature), squares, vectors(4, 6, 16), "tp=2", lr=1e-2, options=options).ok

    with pytest.raises(PlanError) as refused:
        check({})
    rules = shown(refused.value)
    assert rules == {"layers.*.0": "whole"}
    assert check(rules)


def test_a_forward_that_fails_on_a_part_is_named_in_the_rule() -> None:
    with pytest.raises(PlanError, match="on a rank's part it fails with RuntimeError: shape") as refused:
        verify(lambda: Vit(ClassAttention), squares, vectors(4, 6, 16), "tp=2", lr=1e-2)
    assert shown(refused.value) == {"layers.*.0": "whole"}
    options = Options(tensor_rules={"layers.*.0": "whole"})
    assert verify(lambda: Vit(ClassAttention), squares, vectors(4, 6, 16), "tp=2", lr=1e-2, options=options).ok


class Queries(nn.Module):
    """DETR: the weight of an embedding is the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query_embed = nn.Embedding(6, 16)
        self.vit = Vit(VitAttention)

    def forward(self, x: Tensor) -> Tensor:
        return self.vit(x + self.query_embed.weight.unsqueeze(0))  # type: ignore[no-any-return]


def test_an_embedding_whose_weight_is_read_is_named_in_the_rule() -> None:
    with pytest.raises(ValueError, match="query_embed") as refused:
        verify(Queries, squares, vectors(4, 6, 16), "tp=2", lr=1e-2)
    rules = shown(refused.value)
    assert rules == {"query_embed": "whole"}
    assert verify(Queries, squares, vectors(4, 6, 16), "tp=2", lr=1e-2, options=Options(tensor_rules=rules)).ok


class Prompts(nn.Module):
    """Segment Anything: without a mask, the prompt encoder returns a view of a weight, which the decoder adds later."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Embedding(1, 16)

    def forward(self, rows: int) -> Tensor:
        return self.none.weight.reshape(1, 1, -1).expand(rows, -1, -1)


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList([nn.Sequential(nn.Linear(16, 16)), Prompts()])
        self.vit = Vit(VitAttention)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        prompt, encoded = self.prompts[1](len(x)), self.prompts[0](x)
        return self.last(self.vit(encoded) * prompt[:, 0, :4])  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", ["dp=2 zero=3", "dp=2 zero=3 prefetch=0", "dp=2 zero=3 microbatches=2"])
def test_a_view_of_a_parameter_that_a_module_returns_keeps_its_values(plan: str) -> None:
    assert verify(Prompted, squares, vectors(4, 6, 16), plan, lr=1e-2).ok


class WideNorm(nn.LayerNorm):
    """CLIP, Whisper: the norm computes in float32, whatever the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input.float()).type(input.dtype)


class WideGroupNorm(nn.GroupNorm):
    """Guided diffusion, latent diffusion."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input.float()).type(input.dtype)


@pytest.mark.parametrize("norm", [lambda: WideNorm(16), lambda: WideGroupNorm(2, 16)])
@pytest.mark.parametrize("plan", ["dp=2 precision=bf16", "dp=2 zero=3 precision=bf16"])
def test_a_norm_that_converts_its_input_to_float32_trains_in_half_precision(norm: Any, plan: str) -> None:
    model = lambda: nn.Sequential(nn.Linear(6, 16), norm(), nn.ReLU(), nn.Linear(16, 4))  # noqa: E731
    assert verify(model, squares, vectors(4, 6), plan, lr=1e-2).ok


def test_a_model_that_computes_in_float32_itself_gets_the_remedy() -> None:
    class Timestep(nn.Linear):
        """DiT, SiT: the embedding of the time is made in float32."""

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(torch.cos(input.float()))

    model = lambda: nn.Sequential(Timestep(6, 4))  # noqa: E731
    with pytest.raises(RuntimeError) as failed:
        verify(model, squares, vectors(4, 6), "dp=2", lr=1e-2)
    assert any("verify(dtype=None)" in note for note in failed.value.__notes__)
    assert verify(model, squares, vectors(4, 6), "dp=2", lr=1e-2, dtype=None).ok


def test_the_example_of_a_pipeline_gets_the_dtype_of_the_batches() -> None:
    def build() -> nn.Module:
        blocks = [nn.Sequential(nn.Conv1d(6, 6, 1), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(nn.Sequential(*blocks), nn.Flatten(), nn.Linear(12, 4))

    batches = vectors(4, 6, 2)
    options = Options(example=batches[0])
    assert verify(build, squares, batches, "pp=2 microbatches=2", lr=1e-2, options=options).ok


def test_a_running_mean_of_zero_but_for_rounding_is_compared_beside_its_deviation() -> None:
    class Bottleneck(nn.Module):
        """MobileNet: a norm's bias, whose gradient is zero, is all that makes the mean of the next norm's input."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
            self.second, self.next_norm, self.head = nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.next_norm(self.second(self.norm(self.first(x)))).relu())  # type: ignore[no-any-return]

    assert verify(Bottleneck, squares, vectors(16, 6), "dp=2 zero=3", lr=1e-3).ok


def test_a_sparse_buffer_is_refused_with_what_to_do() -> None:
    class Heads(nn.Linear):
        """Whisper: a sparse mask of the heads that align words."""

        def __init__(self) -> None:
            super().__init__(6, 4)
            self.register_buffer("alignment", torch.eye(4, dtype=torch.bool).to_sparse(), persistent=False)

    for model in (Heads, Heads()):
        with pytest.raises(ValueError, match=r"sparse.*register_buffer"):
            verify(model, squares, vectors(4, 6), "dp=2", lr=1e-2)
    dense = Heads()
    dense.register_buffer("alignment", dense.alignment.to_dense(), persistent=False)  # type: ignore[operator]
    assert verify(dense, squares, vectors(4, 6), "dp=2", lr=1e-2).ok
