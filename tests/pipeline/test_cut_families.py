"""Families of Hugging Face transformers, cut between their pieces without a line about any of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.pipeline.cut.model_cut import CutRequest, cut_model
from pipeline.oracle import is_the_model

pytestmark = pytest.mark.usefixtures("float64")

transformers = pytest.importorskip("transformers", reason="the extra with Hugging Face's models is not installed")

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 31
MASK = torch.ones(2, 12, dtype=torch.long).index_fill(1, torch.tensor([10, 11]), 0)
SIZES = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
STACKS = {
    "vocab_size": 31, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0,
}  # fmt: skip
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

TEXT = {"input_ids": TOKENS, "attention_mask": MASK}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Tensor]]] = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 31, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2, "bos_token_id": 1,
         "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        TEXT,
    ),
    "BertForMaskedLM": ("BertConfig", {**SIZES, **QUIET, "max_position_embeddings": 16}, TEXT),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**SIZES, "num_key_value_heads": 1, "head_dim": 8}, TEXT),
    "BartForConditionalGeneration": (
        "BartConfig",
        {**STACKS, **SPECIAL, "max_position_embeddings": 16, "forced_eos_token_id": None},
        {**TEXT, "decoder_input_ids": TOKENS[:, :7]},
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {**STACKS, **SPECIAL, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16,
         "suppress_tokens": None, "begin_suppress_tokens": None},
        {"input_features": torch.linspace(-1, 1, 128).reshape(2, 4, 16).double(), "decoder_input_ids": TOKENS[:, :7]},
    ),
    "ViTForImageClassification": (
        "ViTConfig",
        {**QUIET, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32,
         "image_size": 16, "patch_size": 4},
        {"pixel_values": torch.linspace(-1, 1, 1536).reshape(2, 3, 16, 16).sin().double()},
    ),
}  # fmt: skip


def summed(inputs: dict[str, Tensor]) -> Callable[[nn.Module], Tensor]:
    def call(model: nn.Module) -> Tensor:
        squares: Tensor = model(**inputs).logits.square().sum()
        return squares

    return call


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_cut(name: str) -> None:
    config, sizes, inputs = FAMILIES[name]
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    call = summed(inputs)
    cut = cut_model(model, stages=3, call=call, request=CutRequest("params"))
    is_the_model(model, call, cut)
