"""Tiny mixtures of experts of transformers with random weights, computed in float64."""

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from expert.exact_casts import ExactCasts
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.testing import agree, run

TOKENS, VOCABULARY = 6, 23
TEXT: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 16,
}
LATENT: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
SWITCH: Mapping[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_heads": 4,
    "num_experts": 4,
    "expert_capacity": 4,
    "router_jitter_noise": 0.0,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
NLLB: Mapping[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_experts": 4,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "moe_token_dropout": 0.0,
    "decoder_start_token_id": 2,
}
OF_FOUR: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2Moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**OF_FOUR, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    ),
    "Qwen3Moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**OF_FOUR, "moe_intermediate_size": 12, "head_dim": 8}),
    "DeepseekV2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**LATENT, "topk_method": "group_limited_greedy"}),
    "DeepseekV3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
    "Olmoe": ("OlmoeConfig", "OlmoeForCausalLM", OF_FOUR),
    "GptOss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 8},
    ),
    "Llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 24, "head_dim": 8}
        | {"interleave_moe_layer_step": 1},
    ),
    "Ernie": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12, "moe_num_shared_experts": 1},
    ),
    "Switch": ("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", SWITCH),
    "Nllb": ("NllbMoeConfig", "NllbMoeForConditionalGeneration", NLLB),
}
"""Configuration class, model class and settings of each family."""


BUILDING = threading.RLock()
"""Held while a model is built: ranks that are threads share the generator that is seeded for it."""


def build(family: str, **more: Any) -> Any:
    """Return a model in float64 whose experts are computed by a loop: their grouped product refuses float64."""
    configuration, kind, settings = FAMILIES[family]
    with BUILDING:
        return built(configuration, kind, {**settings, **more}, family=family)


def built(configuration: str, kind: str, settings: Mapping[str, Any], *, family: str = "") -> Any:
    transformers = __import__("transformers")
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(3)
    model = getattr(transformers, kind)(getattr(transformers, configuration)(**{**TEXT, **settings})).double()
    if family not in ("Llama4", "Switch", "Nllb"):
        model.set_experts_implementation("eager")
    for module in model.modules():
        if "dtype" in vars(module):  # of the routers of Switch and NLLB, which convert their parameters to this dtype
            module.dtype = torch.float64
    for name, parameter in model.named_parameters():
        if family == "Nllb" and name.endswith("k_proj.bias"):  # no gradient but rounding: Adam would magnify it from 0
            parameter.data.fill_(0.1)
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return two batches, the last with fewer rows than some plans have ranks."""
    generator = torch.Generator().manual_seed(4)
    drawn = [torch.randint(3, VOCABULARY, (2, rows, TOKENS), generator=generator) for rows in (8, 2)]
    return [(tokens[0], tokens[1]) for tokens in drawn]


def forward(model: Any, batch: Any) -> Any:
    decoded = {"decoder_input_ids": batch[1]} if model.config.is_encoder_decoder else {}
    with ExactCasts():
        return model(batch[0], use_cache=False, **decoded).logits


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def settings() -> dict[str, Any]:
    options = Options(clip_norm=0.5, forward=forward, example=batches()[0])
    return {"loss": loss, "lr": 1e-2, "options": options}


def check(model: Any, plan: str, *, given: Callable[[], Any] = settings) -> None:
    """Two steps on one process and under the plan."""
    expected = alone(copy.deepcopy(model), batches=batches(), **given())

    def main(world: World) -> Any:
        trainer = parallelize(copy.deepcopy(model), plan, world=world, **given())
        steps = outcome(trainer, batches=batches())
        trainer.close()
        return steps

    for found in run(Plan.parse(plan).mesh().size, main):
        agree(found, expected, bound=1e-9)
