"""A parameter that all ranks have, and that meets a rank's own heads, has its gradient summed, or is refused."""

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.plan import Plan
from meshwise.tensor.detect.rules import find_parts
from tensor.splitting import split_agrees

WORDS, WIDTH, HEADS, TOKENS = 13, 12, 4, 5
PLANS = ("tp=2", "tp=2 sequence_parallel=1", "tp=4 tp_mode=2d", "tp=8 tp_mode=2.5d tp_depth=2", "tp=8 tp_mode=3d")


class Mixer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.heads = kind, HEADS
        self.inwards, self.outwards = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind == "temperature":
            self.warmth = nn.Parameter(torch.tensor([1.2]))
        elif kind == "table":
            self.far = nn.Parameter(torch.randn(TOKENS, TOKENS))
        elif kind == "mix":
            self.mix = nn.Linear(WIDTH // HEADS, WIDTH // HEADS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inwards(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        scores = q @ (self.mix(k) if self.kind == "mix" else k).transpose(-1, -2)
        scores = scores * self.warmth if self.kind == "temperature" else scores
        scores = scores + self.far if self.kind == "table" else scores
        output: Tensor = self.outwards((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output


class Hidden(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.bent = nn.PReLU() if kind == "slope" else nn.GELU()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.bent(self.up(x))
        output: Tensor = self.down(y if scale is None else y * scale)
        return output


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.mixer, self.hidden = nn.LayerNorm(WIDTH), Mixer(kind), Hidden(kind)
        if kind == "gate":
            self.gate = nn.Parameter(torch.tensor([0.9]))

    def forward(self, x: Tensor, scale: Tensor | None) -> Tensor:
        y = self.norm(x) * self.gate if self.kind == "gate" else self.norm(x)
        x = x + self.mixer(y)
        output: Tensor = x + self.hidden(x, y.mean(-1, keepdim=True) if self.kind == "stream" else scale)
        return output


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.kind = kind
        if kind in ("scale", "scales"):
            self.scale = nn.Parameter(torch.tensor([1.1]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x * self.scale if self.kind == "scales" else x
        for layer in self.layers:
            x = layer(x, self.scale if self.kind in ("scale", "scales") else None)
        logits: Tensor = self.head(x)
        return logits


def _loss(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    tokens, targets = inputs
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")


def _agrees(kind: str, plan: str, rules: dict[str, str]) -> None:
    torch.manual_seed(1)
    model = Model(kind).double()
    batch = tuple(torch.randint(0, WORDS, (2, 8, TOKENS)).unbind())
    parts = find_parts(model, plan=Plan.parse(plan), rules=rules)
    split_agrees(model, plan=plan, parts=parts, batch=(batch, _loss))


USED_INSIDE = {
    "temperature": "layers.*.mixer.warmth",
    "table": "layers.*.mixer.far",
    "mix": "layers.*.mixer.mix",
    "slope": "layers.*.hidden.bent",
}


@pytest.mark.parametrize("kind", USED_INSIDE)
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_used_for_a_ranks_own_heads_is_summed_or_the_rule_that_sums_it_is_shown(plan: str, kind: str) -> None:
    name = USED_INSIDE[kind]
    _agrees(kind, plan, {name: "each_head"})
    if "sequence_parallel" in plan:  # the same sums
        _agrees(kind, plan, {name: "whole"})
        return
    with pytest.raises(ValueError, match="nobody would sum") as caught:
        _agrees(kind, plan, {name: "whole"})
    shown = dict(re.findall(r'"([^"]+)": "([^"]+)"', str(caught.value)))
    assert {rule.removesuffix(".weight") for rule in shown} == {name}
    _agrees(kind, plan, {name: "whole"} | shown)


@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sequence_parallel=1"])
def test_what_is_used_for_the_stream_is_not_summed_over_its_copies(plan: str) -> None:
    _agrees("gate", plan, {"layers.*.gate": "whole"})
    if "sequence_parallel" in plan:
        _agrees("gate", plan, {"layers.*.gate": "each_head"})
        return
    with pytest.raises(ValueError, match=r'would be too large.*"layers\.\*\.gate": "whole"'):
        _agrees("gate", plan, {"layers.*.gate": "each_head"})


def test_the_stream_that_meets_hidden_features_beside_the_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.hidden\.down.*nobody would sum"):
        _agrees("stream", "tp=2", {})


@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sequence_parallel=1"])
def test_what_hidden_features_and_the_stream_before_the_blocks_have_in_common_is_refused(plan: str) -> None:
    _agrees("scale", plan, {"scale": "each_head"})
    with pytest.raises(ValueError, match=r"scale.*would be too large"):
        _agrees("scales", plan, {"scale": "each_head"})
    with pytest.raises(ValueError, match=r"scale.*nobody would sum"):
        _agrees("scales", plan, {"scale": "whole"})
