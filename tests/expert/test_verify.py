"""Test that `verify` compares mixtures of transformers in float64, and tells a tie of a router from another model."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwise as mw
from expert.test_agreement import batches, build
from meshwise.model.find_mixtures import compute_experts, find_mixtures
from meshwise.reference import next_token_loss


def test_experts_of_transformers_are_computed_in_float64_and_their_model_stays_as_it_is() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    config = transformers.MixtralConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=8
    )
    model = transformers.MixtralForCausalLM(config)
    before = model.config._experts_implementation

    def forward(module: Any, batch: Any) -> Tensor:
        logits: Tensor = module(batch[0], use_cache=False).logits
        return logits

    report = mw.verify(model, next_token_loss, batches(), "dp=2 ep=2", lr=1e-3, options=mw.Options(forward=forward))
    assert report.ok, report.verdict
    assert any("routers chose by scores that were at least" in note for note in report.notes)
    assert model.config._experts_implementation == before
    compute_experts(model, by="eager")
    names = list(find_mixtures(model))
    assert {model.get_submodule(name).config._experts_implementation for name in names} == {"eager"}


def test_models_given_as_functions_are_compared_under_pp() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 16, "max_position_embeddings": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}

    def qwen() -> Any:
        config = transformers.Qwen3MoeConfig(**sizes, **heads, moe_intermediate_size=8, num_experts=4)
        config.num_experts_per_tok = 2
        return transformers.Qwen3MoeForCausalLM(config)

    def forward(module: Any, batch: Any) -> Tensor:
        logits: Tensor = module(batch[0], use_cache=False).logits
        return logits

    options = mw.Options(forward=forward)
    assert mw.verify(qwen, next_token_loss, batches(), "pp=2 microbatches=2", lr=1e-3, options=options).ok
    assert mw.verify(partial(build, "top-2", tied=False), next_token_loss, batches(), "pp=2 dp=2 ep=2", lr=1e-3).ok


class Tied(nn.Module):
    """A mixture whose router gives two experts scores that differ by rounding alone, in another way on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("top-1", tied=False)

    def forward(self, tokens: Tensor) -> Any:
        scores = self.model.get_parameter("blocks.0.mlp.router.scores.weight")
        with torch.no_grad():  # experts 0 and 1: the order of the scores follows the number of rows
            scores[1] = scores[0] * (1 + 1e-13 * (1 if len(tokens) > 4 else -1))
            scores[2:] = -scores[0]
        return self.model(tokens)


def test_a_tie_that_rounding_breaks_is_undecided() -> None:
    report = mw.verify(Tied, next_token_loss, batches()[:1], "dp=2", lr=1e-3)
    assert not report.ok
    assert report.undecided
    assert "is undecided" in report.verdict


@pytest.mark.parametrize(
    "choose", [lambda x: x.argmax(-1), lambda x: torch.argmax(x, dim=1), lambda x: x[..., None].topk(1, 1)[1][..., 0]]
)
def test_a_tie_of_an_argmax_is_undecided_as_well(choose: Callable[[Tensor], Tensor]) -> None:
    class Switched(nn.Module):
        """A router chooses one of two experts; rounding of the scores follows the number of rows."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self.scale = build("top-1", tied=False), nn.Parameter(torch.ones(2))

        def forward(self, tokens: Tensor) -> Any:
            scores = torch.tensor([[1.0, 1.0 + 1e-13 * (1 if len(tokens) > 4 else -1)]], dtype=torch.float64)
            return self.model(tokens) * self.scale[choose(scores)] * (1 + int(choose(scores)))

    report = mw.verify(Switched, next_token_loss, batches()[:1], "dp=2", lr=1e-3)
    assert not report.ok
    assert report.undecided


def test_integers_have_no_ties_that_rounding_breaks() -> None:
    class Longest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build("top-1", tied=False)

        def forward(self, tokens: Tensor) -> Any:
            first = (tokens * 0).argmax(-1)  # as for the position of the last token of a text
            return self.model(tokens) * (1 + len(tokens)) + first.sum()

    assert not mw.verify(Longest, next_token_loss, batches()[:1], "dp=2", lr=1e-3).undecided


def test_the_capacity_of_nllb_depends_on_the_plan_unless_it_holds_all_tokens() -> None:
    """Its router counts the tokens of a micro-batch of a rank; Switch Transformers counts those of a sequence."""
    pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")
    mixtures: Any = importlib.import_module("expert.mixtures_of_transformers")
    options = mw.Options(forward=mixtures.forward)

    def same(family: str, **settings: Any) -> bool:
        made, given = mixtures.build(family, **settings), mixtures.batches()[:1]
        return mw.verify(made, mixtures.loss, given, "dp=2", lr=1e-3, options=options).ok

    assert not same("Nllb", expert_capacity=2)
    assert same("Nllb", expert_capacity=10**9, moe_eval_capacity_token_fraction=0.0)
    assert same("Switch", expert_capacity=1)


def test_another_model_without_a_tie_is_not_the_same() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build("top-1", tied=False)

        def forward(self, tokens: Tensor) -> Any:
            return self.model(tokens) * (1 + len(tokens))

    report = mw.verify(Wrong, next_token_loss, batches()[:1], "dp=2", lr=1e-3)
    assert not report.ok
    assert not report.undecided
