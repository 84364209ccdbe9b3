"""Models of transformers, built from tiny configurations with random weights, are found and split as they are.

A step of every family under every scheme. With 2 KV heads, 4 ranks share them in
pairs. Three steps of Llama and BERT, with all that they are combined with, are in `test_grid`."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grid import Grid
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.tensor.detect.assign_tp_roles import assign_roles
from meshwise.testing import agree, run
from tensor.exact import with_exact_norms

transformers = pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")

TOKENS, VOCABULARY, WIDTH, KEY_HEADS = 6, 23, 32, 2
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = {**SHAPE, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def text(**more: Any) -> dict[str, Any]:
    return {**TEXT, **more}


BERT = text(**NO_DROPOUT, max_position_embeddings=TOKENS, num_labels=3)
GPT2: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 1, "n_head": 4, "vocab_size": VOCABULARY, "num_labels": 3}
GPT2 |= {
    "n_positions": TOKENS,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
T5: dict[str, Any] = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0}
FAMILIES: Mapping[str, tuple[Mapping[str, Any], tuple[str, str, str]]] = {
    "Llama": (
        text(num_key_value_heads=KEY_HEADS, num_labels=3),
        ("LlamaModel", "LlamaForCausalLM", "LlamaForSequenceClassification"),
    ),
    "Qwen2": (
        text(num_key_value_heads=KEY_HEADS, num_labels=3),
        ("Qwen2Model", "Qwen2ForCausalLM", "Qwen2ForTokenClassification"),
    ),
    "Qwen3": (
        text(num_key_value_heads=KEY_HEADS, head_dim=12, tie_word_embeddings=True),
        ("Qwen3Model", "Qwen3ForCausalLM", "Qwen3ForTokenClassification"),
    ),
    "Mistral": (
        text(num_key_value_heads=4, sliding_window=3, num_labels=3),
        ("MistralModel", "MistralForCausalLM", "MistralForSequenceClassification"),
    ),
    "GPT2": (GPT2, ("GPT2Model", "GPT2LMHeadModel", "GPT2ForTokenClassification")),
    "Bert": (BERT, ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")),
    "ViT": ({**SHAPE, **NO_DROPOUT, **IMAGE}, ("ViTModel", "ViTForImageClassification", "ViTForImageClassification")),
    "T5": (T5, ("T5Model", "T5ForConditionalGeneration", "T5EncoderModel")),
}
"""The configuration of each, and its models without a head, with a head of logits, with something else behind it."""


def build(family: str, form: int, *, layers: int = 1) -> Any:
    settings, models = FAMILIES[family]
    settings = {**settings, **{name: layers for name in ("num_layers", "num_hidden_layers") if name in settings}}
    return getattr(transformers, models[form])(getattr(transformers, f"{family}Config")(**settings))


Model = Callable[[], Any]
PLANS = (
    "tp=4",
    "tp=2 sequence_parallel=1",
    "tp=4 tp_mode=2d",
    "tp=8 tp_mode=2.5d tp_depth=2",
    "tp=8 tp_mode=3d",
)


SHAPES = {"pixel_values": (1, 8, 8), "input_features": (8, 2 * TOKENS)}
"""Of what models take that do not take tokens."""


def a_batch(model: Any, *, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    inputs, targets = torch.randint(3, VOCABULARY, (2, rows, TOKENS), generator=generator)
    targets[0, :2] = -100
    if shape := SHAPES.get(model.main_input_name):
        inputs = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    return inputs, targets


def forward(model: Any, batch: Any) -> Any:
    decoded = (
        {"decoder_input_ids": batch[1].clamp_min(3), "use_cache": False} if model.config.is_encoder_decoder else {}
    )
    output = model(batch[0], **decoded)
    return output["logits"] if "logits" in output else output[0]


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Of logits of the vocabulary the cross-entropy; of anything else what takes all its features to compute."""
    targets = batch[1]
    if output.size(-1) != VOCABULARY:
        scale = torch.linspace(-1, 1, output.size(-1), dtype=output.dtype)
        return (functional.normalize(output, dim=-1) * scale).flatten(1).sum(1).exp().sum(), len(targets)
    total = functional.cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, int((targets != -100).sum())


def check(model: nn.Module, plan: str, *, bound: float = 1e-9) -> None:
    """A step on one process and under the plan."""
    given = [a_batch(model, rows=8 if "3d" in plan else 5)]
    model, options = with_exact_norms(model).double(), Options(clip_norm=0.5, forward=forward, example=given[0])
    settings: Mapping[str, Any] = {"loss": loss, "optimizer": torch.optim.SGD, "lr": 1e-2, "options": options}

    def main(world: World) -> Any:
        return outcome(parallelize(copy.deepcopy(model), plan, world=world, **settings), batches=given)

    expected = alone(model, batches=given, **settings)
    for found in run(Plan.parse(plan).mesh().size, main):
        agree(found, expected, bound=bound)


LIKE_LLAMA = {"Qwen2": PLANS[2:], "Qwen3": PLANS[3:], "Mistral": PLANS[2:]}
"""Plans of which families whose blocks are Llama's, but for biases, norms of heads and windows, show no more."""
GRID = Grid(
    {"family": tuple(FAMILIES), "form": (0, 1, 2), "plan": PLANS},
    cost=lambda cell: 2 if cell["family"] == "T5" and cell["form"] < 2 else 1,
    single=("form",),
    heavy=lambda cell: (
        cell["plan"] in LIKE_LLAMA.get(cell["family"], ())
        or ("2.5d" in cell["plan"] and cell["family"] != "GPT2")  # as 2d, but for the depth
        or ("3d" in cell["plan"] and cell["family"] in ("Llama", "Bert"))  # in `test_grid`; refused rows of BERT below
    ),
)


@pytest.mark.grid(GRID)
def test_a_step_is_that_of_one_process(family: str, form: int, plan: str) -> None:
    torch.manual_seed(1)
    check(build(family, form), plan)


@pytest.mark.parametrize(
    "family, form, plan",
    [("T5", 2, "pp=2 tp=4 tp_mode=2d virtual_stages=2 schedule=interleaved microbatches=2"), ("ViT", 1, "pp=2 tp=2")],
)
def test_stages_derive_shapes_of_other_stages_pieces(family: str, form: int, plan: str) -> None:
    """Blocks that return more than hidden states; tokens that a module holds beside its embeddings."""
    torch.manual_seed(1)
    check(build(family, form, layers=3), plan)


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


def persimmon() -> Any:
    """Fused head by head too, and taken apart in a method of its own."""
    return transformers.PersimmonForCausalLM(transformers.PersimmonConfig(**TEXT))


def mpt() -> Any:
    """Biases for every head, of another shape."""
    shape = {"d_model": WIDTH, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY}
    return transformers.MptForCausalLM(transformers.MptConfig(**shape))


def modernbert() -> Any:
    """Windows, and a fused matrix that is viewed and unbound."""
    return transformers.ModernBertForMaskedLM(
        # before 5.17 a configuration of one layer is refused
        transformers.ModernBertConfig(**text(num_hidden_layers=2), cls_token_id=1, sep_token_id=2)
    )


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


def bart() -> Any:
    """A vocabulary that is scaled; two stacks, and no norm behind them."""
    stacks = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(
        **stacks, d_model=WIDTH, encoder_layers=1, decoder_layers=1, vocab_size=VOCABULARY, dropout=0.0, pad_token_id=0
    )
    return transformers.BartForConditionalGeneration(config)


def whisper() -> Any:
    """Hidden states that are convolved."""
    stacks = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    lengths = {"max_source_positions": TOKENS, "max_target_positions": TOKENS, "num_mel_bins": 8, "dropout": 0.0}
    config = transformers.WhisperConfig(
        **stacks, **lengths, d_model=WIDTH, encoder_layers=1, decoder_layers=1, vocab_size=VOCABULARY, pad_token_id=0
    )
    return transformers.WhisperForConditionalGeneration(config)


def dinov2() -> Any:
    """A classifier that reads two tokens side by side."""
    return transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**SHAPE, **IMAGE))


FURTHER = {
    opt: "tp=8 tp_mode=3d",
    falcon: "tp=8 tp_mode=3d",
    phi3: "tp=2",
    olmo2: "tp=4",
    glm4: "tp=4 tp_mode=2d",
    bloom: "tp=2",
    persimmon: "tp=2 sequence_parallel=1",
    mpt: "tp=4 tp_mode=2d",
    modernbert: "tp=2 sequence_parallel=1",
    bart: "tp=4 tp_mode=2d",
    whisper: "tp=4 tp_mode=2d",
    dinov2: "tp=4 tp_mode=2d",
}


@pytest.mark.grid(
    Grid(
        {"model": tuple(model.__name__ for model in FURTHER)},
        # Two stacks that whisper has too, and rows of OPT that 3d splits as well.
        heavy=lambda cell: cell["model"] in ("bart", "falcon"),
    )
)
def test_a_step_of_further_families_is_that_of_one_process(model: str) -> None:
    """These compute in float32 here and there, whatever they are given."""
    torch.manual_seed(1)
    [[build_one, plan]] = [pair for pair in FURTHER.items() if pair[0].__name__ == model]
    check(build_one(), plan, bound=1e-6)


@pytest.mark.parametrize("build_one", [bart, falcon])
def test_two_stacks_and_fused_groups_of_queries_are_those_of_one_process(build_one: Model) -> None:
    """Under one dimension; under more in the whole of the grid above."""
    torch.manual_seed(1)
    check(build_one(), "tp=2", bound=1e-6)


def test_rows_and_tokens_in_one_dim_are_taken_apart_where_the_tokens_are_split() -> None:
    check(opt(), "tp=2 sequence_parallel=1", bound=1e-6)


def test_stages_derive_shapes_of_pieces_with_arguments_for_all_tokens() -> None:
    """In the blocks a rank has 2 or 1 tokens, and their rotary tables are for all 6."""
    torch.manual_seed(1)
    settings = {name: value for name, value in GPT2.items() if name != "num_labels"}
    model = transformers.GPTJForCausalLM(transformers.GPTJConfig(**{**settings, "n_layer": 4}, rotary_dim=4))
    check(model, "pp=2 tp=4 sequence_parallel=1 partition=params", bound=1e-6)


def test_experts_are_kept_whole_by_a_rule() -> None:
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**TEXT, num_key_value_heads=KEY_HEADS))
    parts = assign_roles(model, plan=Plan(tp=2), rules={"model.layers.*.mlp": "whole"})
    assert (parts["model.layers.0.mlp"].role, parts["model.layers.0.self_attn.q_proj"].role) == ("whole", "colwise")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # DeBERTa before 5.23
def test_a_branch_is_kept_whole_by_the_rule_that_the_refusal_shows_where_its_matrices_alone_cannot_be() -> None:
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": TOKENS}
    config = transformers.DebertaConfig(**BERT, **relative)
    with torch.device("meta"):
        model = transformers.DebertaForMaskedLM(config)
    with pytest.raises(ValueError, match="tensor parallelism found no role for") as raised:
        assign_roles(model, plan=Plan(tp=2))
    assert 'as in {"deberta.encoder.layer.*.attention": "whole"}' in str(raised.value)
    assign_roles(model, plan=Plan(tp=2), rules={"deberta.encoder.layer.*.attention": "whole"})


def test_uneven_rows_under_3d_are_refused_where_a_forward_counts_them() -> None:
    torch.manual_seed(1)
    model = build("Bert", form=1).double()

    def main(world: World) -> None:
        trainer = parallelize(
            copy.deepcopy(model), "tp=8 tp_mode=3d", world=world, loss=loss, lr=0.1, options=Options(forward=forward)
        )
        trainer.step(a_batch(model, rows=5))

    with pytest.raises(ValueError, match=r"takes the number of rows from its input.*Use batches .* that divide evenly"):
        run(8, main)
