"""Tiny models of transformers whose attentions have gates or values of another width, or that read images."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from expert.exact_casts import ExactCasts
from expert.mixtures_of_transformers import TEXT, TOKENS

IMAGE = 2
"""Token in whose place a feature of an image goes."""


@dataclass(frozen=True)
class Family:
    """Names of a configuration and of a model of transformers, settings, and plans.

    | settings   of the configuration, besides those of `TEXT`
    | image      shape of the image of a row; () without images
    | given      further arguments of the forward
    | features   number of tokens of a row in whose place features of the image go"""

    configuration: str
    model: str
    settings: Mapping[str, Any]
    plans: tuple[str, ...]
    image: tuple[int, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    features: int = 0

    def forward(self, model: Any, batch: Any) -> Any:
        """Return the logits in float64, or the hidden states of a model without a head."""
        tokens, rows = batch[0].clone(), len(batch[0])
        tokens[:, : self.features] = IMAGE
        given = {key: value.expand(value.size(0), rows, -1) for key, value in self.given.items()}
        if self.image:
            wave = torch.linspace(1, 3, torch.Size(self.image).numel(), dtype=torch.float64, device=batch[0].device)
            wave = wave.view(1, *self.image)
            given["pixel_values"] = (wave * (1 + batch[0].double().sum(1)).view(-1, *[1] * len(self.image))).sin()
        if len(self.image) == 2:  # patches, which models take in one dim
            kinds = (tokens == IMAGE).int()
            given |= {"mm_token_type_ids": kinds, "moe_mm_token_type_ids": kinds} if not self.given else {}
            given |= {"pixel_values": given["pixel_values"].flatten(0, 1)}
            given |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * rows, device=batch[0].device)}
        with ExactCasts():
            output = model(tokens, use_cache=False, **given)
        return output.logits if "logits" in output else output.last_hidden_state


_MIXTURE: Mapping[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 12,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
_WINDOWS: Mapping[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
_SPARSE: Mapping[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
_SQUARE: Mapping[str, Any] = {**_MIXTURE, "num_key_value_heads": 4, "head_dim": 8}
_LAGUNA: Mapping[str, Any] = {**_MIXTURE, **_WINDOWS, **_SPARSE, "num_attention_heads_per_layer": [4, 8]}
_LINEAR: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT: Mapping[str, Any] = {
    **_SQUARE,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 3,
}
_PATCHES: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_heads": 2,
    "depth": 2,
    "intermediate_size": 24,
    "patch_size": 2,
    "in_channels": 1,
    "out_hidden_size": 32,
}
_ENCODER: Mapping[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_channels": 1}
_SAM: Mapping[str, Any] = {
    **_ENCODER,
    "output_channels": 8,
    "image_size": 16,
    "patch_size": 4,
    "window_size": 2,
    "global_attn_indexes": [1],
    "mlp_dim": 24,
    "downsample_channels": [12, 24],
    "initializer_range": 0.02,
}
_CLIP: Mapping[str, Any] = {**_ENCODER, "hidden_size": 24, "intermediate_size": 20, "image_size": 16, "patch_size": 16}
_AUDIO: Mapping[str, Any] = {
    "d_model": 24,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "output_dim": 32,
    "num_mel_bins": 8,
    "downsample_hidden_size": 4,
    "max_source_positions": 16,
}
_ROTATED: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_ERNIE: Mapping[str, Any] = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [12, 12], **_SPARSE}
_BOTH = "dp=2 tp=2 ep=2 etp=2"
FAMILIES: Mapping[str, Family] = {
    "GraniteMoe": Family("GraniteMoeConfig", "GraniteMoeForCausalLM", _SQUARE, (_BOTH,)),
    "GraniteMoeShared": Family(
        "GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM", _SQUARE, ("tp=2 sequence_parallel=1",)
    ),
    "HunYuan": Family("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", {**_SQUARE, "moe_topk": 2}, (_BOTH,)),
    "Afmoe": Family(
        "AfmoeConfig", "AfmoeForCausalLM", {**_SQUARE, **_WINDOWS, "num_dense_layers": 1}, ("tp=2 sequence_parallel=1",)
    ),
    "Beam": Family("BeamConfig", "BeamForCausalLM", {**_MIXTURE, **_WINDOWS, **_SPARSE}, (_BOTH, "tp=4")),
    "Laguna": Family("LagunaConfig", "LagunaForCausalLM", _LAGUNA, ("tp=2 sequence_parallel=1", "tp=4")),
    "LagunaByFeature": Family("LagunaConfig", "LagunaForCausalLM", {**_LAGUNA, "gating": "per-element"}, (_BOTH,)),
    "MiMo": Family(
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        {**_MIXTURE, **_WINDOWS, **_SPARSE, "v_head_dim": 8},
        (_BOTH, "tp=4 sequence_parallel=1"),
    ),
    "MuseSpark": Family(
        "MuseSparkTextConfig",
        "MuseSparkTextModel",
        {**_MIXTURE, **_SPARSE, "head_dim": 8, "moe_hidden_size": 16},
        ("dp=2 tp=2 ep=2",),
    ),
    "Gemma4": Family(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {**_WINDOWS, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0}
        | {"num_kv_shared_layers": 0},
        ("tp=2 sequence_parallel=1", "tp=4 tp_mode=2d"),
    ),
    "Qwen3Next": Family("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_MIXTURE, **_LINEAR}, (_BOTH, "tp=4")),
    "Qwen3_5": Family(
        "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_LINEAR, "num_key_value_heads": 2, "head_dim": 12}, ("tp=2",)
    ),
    "HunYuanV4": Family("HYV4Config", "HYV4ForCausalLM", _LATENT, (_BOTH,)),
    "AXK2": Family("AXK2Config", "AXK2ForCausalLM", _LATENT, (_BOTH,)),
    "MistralLarge4": Family("MistralLarge4TextConfig", "MistralLarge4TextModel", _LATENT, (_BOTH,)),
    "Step3p7": Family(
        "Step3p7Config",
        "Step3p7ForConditionalGeneration",
        {
            "text_config": {**TEXT, **_MIXTURE, **_WINDOWS, **_SPARSE, "share_expert_dim": 12},
            "vision_config": {**_ENCODER, "mlp_ratio": 1.5, "patch_size": 2, "image_size": 8},
            "image_token_id": IMAGE,
        },
        (_BOTH,),
        image=(1, 8, 8),
        features=1,
    ),
    "ErnieImages": Family(
        "Ernie4_5_VLMoeConfig",
        "Ernie4_5_VLMoeForConditionalGeneration",
        {
            "text_config": {**TEXT, **_ERNIE, "moe_num_shared_experts": 1, "rope_parameters": _ROTATED},
            "vision_config": _PATCHES,
            "image_token_id": IMAGE,
        },
        (_BOTH,),
        image=(16, 4),
        features=4,
    ),
    "Qwen3Omni": Family(
        "Qwen3OmniMoeThinkerConfig",
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        {
            "text_config": {**TEXT, **_SQUARE, "rope_parameters": _ROTATED},
            "vision_config": {**_PATCHES, "temporal_patch_size": 1, "deepstack_visual_indexes": [0]},
            "audio_config": _AUDIO,
            **{f"{kind}_token_id": number for number, kind in enumerate(("image", "video", "audio"), start=IMAGE)},
            "vision_start_token_id": 9,
        },
        ("tp=2",),
        image=(16, 4),
        given={"position_ids": torch.arange(TOKENS).expand(3, 1, TOKENS)},
        features=4,
    ),
    "UnlimitedOcr": Family(
        "UnlimitedOcrConfig",
        "UnlimitedOcrForConditionalGeneration",
        {
            "text_config": {**TEXT, **_MIXTURE, "num_key_value_heads": 4, "n_group": 1, "sliding_window": 8},
            "vision_config": {"sam_config": _SAM, "encoder_config": _CLIP},
            "image_token_id": IMAGE,
        },
        ("tp=2",),
        image=(1, 16, 16),
        features=3,
    ),
}
