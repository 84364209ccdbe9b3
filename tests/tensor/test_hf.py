"""Models of transformers, built from tiny configurations with random weights, are found and split as they are.

A step of every family under every scheme. With 2 key heads, 4 ranks share them in
pairs. Three steps of Llama and BERT, with all that they are combined with, are in `test_grid`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.comm.world import World
from meshwise.parallelize import Options, parallelize
from meshwise.plan import Plan, PlanError
from meshwise.tensor.rules import find_parts
from meshwise.testing import agree, alone, outcome, run
from tensor.exact import with_exact_norms

transformers = pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")

ROWS = (8, 5, 4)
EVEN_ROWS = (8, 4, 8)
TOKENS, VOCABULARY, WIDTH, KEY_HEADS = 6, 23, 32, 2
SHAPE = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {**SHAPE, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=KEY_HEADS))


def qwen2() -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT, num_key_value_heads=KEY_HEADS))


def qwen3() -> Any:
    config = transformers.Qwen3Config(**TEXT, num_key_value_heads=KEY_HEADS, head_dim=12, tie_word_embeddings=True)
    return transformers.Qwen3ForCausalLM(config)


def mistral() -> Any:
    config = transformers.MistralConfig(**TEXT, num_key_value_heads=4, sliding_window=3)
    return transformers.MistralForCausalLM(config)


def gpt2() -> Any:
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    shape = {"n_embd": WIDTH, "n_layer": 1, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": TOKENS}
    config = transformers.GPT2Config(**shape, **dropout, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, **NO_DROPOUT, max_position_embeddings=TOKENS))


def classifier() -> Any:
    config = transformers.BertConfig(**TEXT, **NO_DROPOUT, max_position_embeddings=TOKENS, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def vit() -> Any:
    config = transformers.ViTConfig(**SHAPE, **NO_DROPOUT, image_size=8, patch_size=4, num_channels=1, num_labels=5)
    return transformers.ViTForImageClassification(config)


def t5() -> Any:
    shape = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
    config = transformers.T5Config(**shape, vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


Model = Callable[[], Any]
PLANS = (
    "tp=4",
    "tp=2 sequence_parallel=1",
    "tp=4 tp_mode=2d",
    "tp=8 tp_mode=2.5d tp_depth=2",
    "tp=8 tp_mode=3d",
)


def batches(model: Model, *, sizes: Sequence[int]) -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    drawn = []
    for rows in sizes:
        inputs, targets = torch.randint(1, VOCABULARY, (2, rows, TOKENS), generator=generator)
        targets[0, :2] = -100
        if model is vit:
            inputs = torch.randn(rows, 1, 8, 8, generator=generator, dtype=torch.float64)
        if model in (vit, classifier):
            targets = targets[:, -1] % 3
        drawn.append((inputs, targets))
    return drawn


def forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(model, transformers.T5ForConditionalGeneration):
        return model(input_ids=batch[0], decoder_input_ids=batch[0].flip(1), use_cache=False).logits
    return model(batch[0]).logits


def loss(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    targets = batch[1].flatten()
    total = functional.cross_entropy(logits.flatten(0, -2), targets, ignore_index=-100, reduction="sum")
    return total, int((targets != -100).sum())


def check(build: Model, plan: str, *, steps: int, bound: float = 1e-9, optimizer: Any = torch.optim.AdamW) -> None:
    torch.manual_seed(1)
    model = with_exact_norms(build()).double()
    given = batches(build, sizes=EVEN_ROWS if "3d" in plan else ROWS)[:steps]
    options = Options(clip_norm=0.5, forward=forward)
    settings: Mapping[str, Any] = {"loss": loss, "optimizer": optimizer, "lr": 1e-2, "options": options}

    def main(world: World) -> Any:
        return outcome(parallelize(copy.deepcopy(model), plan, world=world, **settings), batches=given)

    expected = alone(model, batches=given, **settings)
    for found in run(Plan.parse(plan).mesh().size, main):
        agree(found, expected, bound=bound)


FAMILIES = (llama, qwen2, qwen3, mistral, gpt2, classifier, vit, t5)
# Under 2.5d these alone: Qwen and Mistral are to tensor parallelism what Llama is, which is in `test_grid` as BERT is.
DEEP = (gpt2, vit, t5)
TABLE = [(build, plan) for build in FAMILIES for plan in PLANS if build in DEEP or "2.5d" not in plan]


@pytest.mark.parametrize("build, plan", TABLE, ids=[f"{build.__name__} {plan}" for build, plan in TABLE])
def test_a_step_is_that_of_one_process(build: Model, plan: str) -> None:
    check(build, plan, steps=1, optimizer=torch.optim.SGD)


def phi3() -> Any:
    """Fused q, k and v of different sizes, counted in the configuration."""
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**TEXT, num_key_value_heads=KEY_HEADS))


def olmo2() -> Any:
    """Norms behind, and over all heads."""
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**TEXT, num_key_value_heads=KEY_HEADS))


def glm4() -> Any:
    """A fused gate, and norms on both sides."""
    config = transformers.Glm4Config(**TEXT, num_key_value_heads=KEY_HEADS, head_dim=8)
    return transformers.Glm4ForCausalLM(config)


def bloom() -> Any:
    """Fused head by head; biases of the scores for every head."""
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(hidden_size=WIDTH, n_layer=2, n_head=4, vocab_size=23)
    )


def mpt() -> Any:
    """Biases for every head, of another shape."""
    shape = {"d_model": WIDTH, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY}
    return transformers.MptForCausalLM(transformers.MptConfig(**shape))


def modernbert() -> Any:
    """Windows, and a fused matrix that is viewed and unbound."""
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**TEXT, cls_token_id=1, sep_token_id=2))


def opt() -> Any:
    """Rows and tokens flattened into one dim for the MLP."""
    config = transformers.OPTConfig(
        **{**TEXT, "ffn_dim": 48, "word_embed_proj_dim": WIDTH, "max_position_embeddings": TOKENS, "dropout": 0.0}
    )
    return transformers.OPTForCausalLM(config)


def falcon() -> Any:
    """Matrices of a class of their own; fused by groups of queries; a mask, handed over by its place, for each head."""
    new = {"new_decoder_architecture": True, "num_kv_heads": KEY_HEADS, "alibi": True, "hidden_dropout": 0.0}
    config = transformers.FalconConfig(**{**TEXT, **new})
    return transformers.FalconForCausalLM(config)


FURTHER = {
    opt: "tp=8 tp_mode=3d",
    falcon: "tp=8 tp_mode=3d",
    phi3: "tp=2",
    olmo2: "tp=4",
    glm4: "tp=4 tp_mode=2d",
    bloom: "tp=2",
    mpt: "tp=4 tp_mode=2d",
    modernbert: "tp=2 sequence_parallel=1",
}


@pytest.mark.parametrize("build, plan", FURTHER.items(), ids=[build.__name__ for build in FURTHER])
def test_a_step_of_further_families_is_that_of_one_process(build: Model, plan: str) -> None:
    """These compute in float32 here and there, whatever they are given."""
    check(build, plan, steps=1, bound=1e-6, optimizer=torch.optim.SGD)


def test_rows_and_tokens_in_one_dim_are_taken_apart_where_the_tokens_are_split() -> None:
    check(opt, "tp=2 sequence_parallel=1", steps=1, bound=1e-6, optimizer=torch.optim.SGD)


@pytest.mark.parametrize(
    "build, message",
    [
        (
            lambda: transformers.LlamaModel(transformers.LlamaConfig(**TEXT)),
            "returns its stream of 32 features.*works: tp_mode=1d",
        ),
        (
            lambda: transformers.Dinov2ForImageClassification(
                transformers.Dinov2Config(**SHAPE, image_size=8, patch_size=4, num_channels=1, num_labels=5)
            ),
            "classifier: Linear is kept whole, and what it reads is the stream.*works: tp_mode=1d",
        ),
    ],
    ids=["without a head", "a head that reads two tokens"],
)
def test_what_needs_all_features_of_the_stream_is_refused(build: Model, message: str) -> None:
    with torch.device("meta"):
        model = build()
    find_parts(model, plan=Plan(tp=2))
    with pytest.raises(PlanError, match=message):
        find_parts(model, plan=Plan.parse("tp=4 tp_mode=2d"))


def test_experts_are_kept_whole_by_the_rule_that_the_refusal_shows() -> None:
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**TEXT, num_key_value_heads=KEY_HEADS))
    with pytest.raises(ValueError, match=r"declares .*experts' as 'moe_tp_experts'") as raised:
        find_parts(model, plan=Plan(tp=2))
    assert str(raised.value).endswith('{"model.layers.*.mlp": "whole"}')
    parts = find_parts(model, plan=Plan(tp=2), rules={"model.layers.*.mlp": "whole"})
    assert (parts["model.layers.0.mlp"].role, parts["model.layers.0.self_attn.q_proj"].role) == ("whole", "first")


def test_uneven_rows_under_3d_are_refused_where_a_forward_counts_them() -> None:
    torch.manual_seed(1)
    model = bert().double()

    def main(world: World) -> None:
        trainer = parallelize(
            copy.deepcopy(model), "tp=8 tp_mode=3d", world=world, loss=loss, lr=0.1, options=Options(forward=forward)
        )
        trainer.step(batches(bert, sizes=(5,))[0])

    with pytest.raises(ValueError, match=r"takes the number of rows from its input.*Use batches .* that divide evenly"):
        run(8, main)
