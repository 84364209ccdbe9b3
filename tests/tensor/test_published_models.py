"""Attentions and MLPs of published models have the loss and gradients of one process, or are refused with a rule."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from expert.exact_casts import ExactCasts
from meshwise.plan import Plan, PlanError
from meshwise.tensor.detect.assign_tp_roles import Rules, assign_roles
from tensor.plain import shown
from tensor.splitting import split_agrees

transformers = pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")

WORDS = 31
SHAPE: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {"num_key_value_heads": 2}
QUIET = {
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_dropout", "dropout"), 0.0),
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "activation_dropout"), 0.0),
}
STACKS: Mapping[str, Any] = {
    "d_model": 32,
    **{f"{stack}_{what}": 2 for stack in ("encoder", "decoder") for what in ("layers", "attention_heads")},
    **{f"{stack}_ffn_dim": 48 for stack in ("encoder", "decoder")},
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "vocab_size": WORDS,
    "src_vocab_size": WORDS,
    "tgt_vocab_size": WORDS,
}
DEBERTA: Mapping[str, Any] = {
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 4,
    "position_biased_input": False,
}
GEMMA_4: Mapping[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": WORDS,
    "layer_types": ["sliding_attention", "full_attention"],
}


def build(name: str, settings: Mapping[str, Any]) -> nn.Module:
    """With every parameter near its start but different from the others, such as the norms of the heads."""
    torch.manual_seed(1)
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**QUIET, **settings)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("k_proj.bias"))  # its gradient is 0, but for rounding
    return model


def loss(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    tokens, targets = inputs
    decoded = {"decoder_input_ids": targets} if model.config.is_encoder_decoder else {}  # type: ignore[union-attr]
    with ExactCasts():
        output = model(tokens, **decoded, use_cache=False) if "use_cache" in _arguments(model) else model(tokens)
        logits = output.logits
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _arguments(model: nn.Module) -> Sequence[str]:
    return type(model).forward.__code__.co_varnames


def check(name: str, settings: Mapping[str, Any], plan: str, *, rules: Rules | None = None) -> None:
    model = build(name, settings)
    batch = torch.randint(3, WORDS, (2, 3, 6), generator=torch.Generator().manual_seed(4)).unbind()
    parts = assign_roles(model, plan=Plan.parse(plan), rules=rules)
    assert any(part.role == "colwise" for part in parts.values())
    split_agrees(model, plan=plan, parts=parts, batch=(batch, loss), bound=1e-9)


FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "heads interleaved in the branch for several KV heads": ("GPTBigCodeForCausalLM", {**SHAPE, "multi_query": False}),
    "the same, with sections of one size": ("FalconForCausalLM", {**SHAPE, "multi_query": False}),
    "groups of queries": (
        "FalconForCausalLM",
        {**SHAPE, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "clipped": (
        "MptForCausalLM",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": WORDS, "attn_config": {"clip_qkv": 0.3}},
    ),
    "norms of the heads, rotated in part": ("PhiForCausalLM", {**SHAPE, **GQA, "qk_layernorm": True}),
    "norms of the heads, fused": ("PersimmonForCausalLM", SHAPE),
    "norms between the matrices": ("BitNetForCausalLM", {**SHAPE, **GQA}),
    "one key matrix for two inputs": ("DebertaV2ForMaskedLM", {**SHAPE, **DEBERTA}),
    "a query by another name": ("FSMTForConditionalGeneration", STACKS),
    "an argument between the matrices": ("Gemma4ForCausalLM", {**SHAPE, **GEMMA_4}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_model_is_that_of_one_process(family: str) -> None:
    check(*FAMILIES[family], "tp=2")


@pytest.mark.parametrize("plan", ["tp=2", "tp=4"])
@pytest.mark.parametrize("name", ["Olmo2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "BitNetForCausalLM"])
def test_norms_of_queries_and_keys_are_right_with_fewer_kv_heads_than_ranks(name: str, plan: str) -> None:
    """Over all heads in OLMo 2, for each head in Qwen 3 and Gemma 3, over the output of all heads in BitNet."""
    check(name, {**SHAPE, **GQA, "head_dim": 8}, plan)


REFUSED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "a norm for each head": ("StableLmForCausalLM", {**SHAPE, **GQA, "qk_layernorm": True}),
    "a bias of the last attention": ("GPTNeoXJapaneseForCausalLM", SHAPE),
    "fused in four groups of heads": (
        "CodeGenForCausalLM",
        {"n_embd": 64, "n_layer": 2, "n_head": 16, "rotary_dim": 4, "vocab_size": WORDS},
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_published_model_that_is_refused_is_right_with_the_rules_shown(family: str) -> None:
    name, settings = REFUSED[family]
    with pytest.raises(ValueError, match="found no role for these parameters") as caught:
        assign_roles(build(name, settings), plan=Plan(tp=2))
    rules = shown(caught.value)
    assert set(rules.values()) == {"whole"}
    check(name, settings, "tp=2", rules=rules)


def test_a_fused_matrix_with_one_kv_head_is_refused_with_a_rule() -> None:
    model = build("GPTBigCodeForCausalLM", {**SHAPE, "multi_query": True})
    with pytest.raises(PlanError, match=r"4 heads over 1 KV heads.*rules 'transformer\.h\.\*\.attn': 'whole'"):
        assign_roles(model, plan=Plan(tp=2))


class Merged(nn.Module):
    """Queries of the input; keys and values of the input and of a memory, as in T5Gemma 2."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        k = torch.cat((self.k(x), self.k(memory)), 1)
        v = torch.cat((self.v(x), self.v(memory)), 1)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (self.q(x), k, v))
        output: Tensor = self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return output


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, 16), nn.ModuleList(Merged() for _ in range(2))
        self.memory, self.head = nn.Linear(16, 16), nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        memory = self.memory(x).tanh()
        for layer in self.layers:
            x = x + layer(x, memory)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("plan", ["tp=2", "tp=4"])
def test_a_matrix_that_reads_two_inputs_has_the_gradients_of_both(plan: str) -> None:
    torch.manual_seed(1)
    model = Translator().double()
    tokens = torch.randint(0, WORDS, (3, 6))
    parts = assign_roles(model, plan=Plan.parse(plan))
    split_agrees(model, plan=plan, parts=parts, batch=((tokens,), lambda m, batch: m(batch[0]).tanh().square().sum()))
