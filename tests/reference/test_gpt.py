import math
from typing import Any

import pytest
import torch

from meshwise.reference import GPT, GPTConfig, MixtureConfig, MixtureGPT, next_token_loss

VARIANTS: dict[str, dict[str, Any]] = {
    "learned": {},
    "rotary": {"positions": "rotary"},
    "tied": {"tied": True},
    "biases": {"bias": True},
    "grouped": {"kv_heads": 2, "positions": "rotary"},
}


def build(**changes: Any) -> GPT:
    torch.manual_seed(0)
    shape = {"vocabulary": 31, "context": 12, "layers": 2, "heads": 4, "width": 16}
    return GPT(GPTConfig(**{**shape, **changes})).double()


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_token_sees_the_tokens_before_it_and_none_after(changes: dict[str, Any]) -> None:
    model = build(**changes)
    tokens = torch.randint(0, 31, (2, 12))
    other = tokens.clone()
    other[:, 7] = (other[:, 7] + 1) % 31
    before, after = model(tokens), model(other)
    assert before.shape == (2, 12, 31)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all()


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_parameter_gets_a_gradient(changes: dict[str, Any]) -> None:
    model = build(**changes)
    tokens = torch.randint(0, 31, (2, 13))
    total, count = next_token_loss(model(tokens[:, :-1]), (tokens[:, :-1], tokens[:, 1:]))
    (total / count).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_an_untrained_model_knows_nothing() -> None:
    model = build(width=64)
    tokens = torch.randint(0, 31, (8, 13))
    total, count = next_token_loss(model(tokens[:, :-1]), (tokens[:, :-1], tokens[:, 1:]))
    assert (total / count).item() == pytest.approx(math.log(31), abs=0.1)


def test_rotary_attention_depends_on_distances_only() -> None:
    rotary = build(positions="rotary").get_submodule("blocks.0.attention.rotary")
    q, k = torch.randn(2, 1, 1, 1, 4, dtype=torch.float64)
    a, b = rotary(q.expand(1, 1, 12, 4)), rotary(k.expand(1, 1, 12, 4))
    scores = (a @ b.transpose(-1, -2))[0, 0]
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-6, atol=1e-6)


def test_projections_into_the_residual_stream_start_smaller_with_depth() -> None:
    model = build(width=128, layers=8)
    assert model.get_parameter("blocks.0.mlp.expansion.weight").std().item() == pytest.approx(0.02, rel=0.05)
    for part in ("attention", "mlp"):
        projection = model.get_parameter(f"blocks.0.{part}.projection.weight")
        assert projection.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)


def test_the_tied_head_is_the_embedding() -> None:
    model = build(tied=True)
    assert model.head.weight is model.embedding.weight


def test_dropout_acts_in_training_only() -> None:
    model = build(dropout=0.5)
    tokens = torch.randint(0, 31, (1, 12))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"width": 18}, "width=18 must be a multiple of heads=4"),
        ({"kv_heads": 3}, "heads=4 must be a multiple of kv_heads=3"),
        ({"positions": "sinus"}, "positions='sinus' must be 'learned' or 'rotary'"),
        ({"positions": "rotary", "width": 12}, "even head width; width/heads is 3"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="13 tokens do not fit the context of 12"):
        build()(torch.zeros(1, 13, dtype=torch.long))
    mixture = MixtureGPT(MixtureConfig(vocabulary=5, context=4, layers=1, width=8, heads=2, experts=2))
    with pytest.raises(ValueError, match="5 tokens do not fit the context of 4"):
        mixture(torch.zeros(1, 5, dtype=torch.long))
