"""What fused attention costs: all products are counted, those that a causal mask hides are not all computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MappingProxyType
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshwise.simulate.cluster import Cluster, Device, MatmulEfficiency
from meshwise.simulate.cost_model import CostModel
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_tape import MatrixProduct, TapeOperation

CLUSTER = Cluster(
    Device(peak=MappingProxyType({"bfloat16": 1e12, "float32": 1e12}), attention=MatmulEfficiency(best=1.0))
)


class _Attending(torch.nn.Module):
    def __init__(self, *, causal: bool, fewer: int) -> None:
        """`fewer`: how many times as many keys as queries."""
        super().__init__()
        self.fewer = fewer
        self.projection = torch.nn.Linear(64, 64)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        y = self.projection(x)[:, None]
        return functional.scaled_dot_product_attention(y[:, :, : y.size(2) // self.fewer], y, y, is_causal=self.causal)


def _attention(
    device: Literal["cpu", "cuda"], *, module: Callable[[], torch.nn.Module], length: int = 256
) -> list[TapeOperation]:
    def loss(output: Tensor, _: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return output.sum(), output.numel()

    x = torch.zeros(1, length, 64)
    subject = RehearsalSubject(module, loss, (x, x))
    precision = " precision=bf16" if device == "cuda" else ""
    rehearsal = rehearse(subject, plan=f"dp=1{precision}", ranks=1, device=device)
    found = [
        entry
        for part in rehearsal.steps[0]
        for entry in part.entries
        if isinstance(entry, TapeOperation) and "attention" in entry.name
    ]
    assert len(found) == 2  # forward and backward
    return found


def test_sizes_of_attention_have_the_number_of_keys() -> None:
    products = [one.product for one in _attention("cpu", module=lambda: _Attending(causal=False, fewer=4))]
    assert products == [MatrixProduct(1, 64, 64, 256)] * 2


@pytest.mark.parametrize(
    "device, length, part",
    [
        ("cuda", 256, 0.5),
        ("cuda", 4096, 0.5),
        ("cpu", 256, 1.0),  # less than what torch's kernel takes at a time
        ("cpu", 1024, 0.75),
        ("cpu", 4096, 0.5625),
    ],
)
def test_what_a_causal_mask_hides_is_counted_and_not_computed(
    device: Literal["cpu", "cuda"], length: int, part: float
) -> None:
    cost_model = CostModel(CLUSTER)
    modules = [functools.partial(_Attending, causal=causal, fewer=1) for causal in (False, True)]
    every, causal = (_attention(device, module=module, length=length) for module in modules)
    assert [one.flops for one in causal] == [one.flops for one in every]
    kernel = CLUSTER.device.kernel
    for masked, whole in zip(causal, every, strict=True):
        assert cost_model.seconds(masked) - kernel == pytest.approx(part * (cost_model.seconds(whole) - kernel))


class _Grouped(torch.nn.Module):
    """Attention of 4 query heads of 16 features that share `key_heads` key heads."""

    def __init__(self, *, key_heads: int) -> None:
        super().__init__()
        self.queries, self.keys = torch.nn.Linear(64, 64), torch.nn.Linear(64, 16 * key_heads)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (layer(x).unflatten(2, (-1, 16)).transpose(1, 2) for layer in (self.queries, self.keys))
        return functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_key_heads_that_query_heads_share_save_no_products(device: Literal["cpu", "cuda"]) -> None:
    for key_heads in (4, 2):
        both = _attention(device, module=functools.partial(_Grouped, key_heads=key_heads))
        assert [one.flops for one in both] == [4 * 256 * 256 * 64, 10 * 256 * 256 * 64]
