"""Models of transformers, as they are, train under cp as on one process in float64."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grid import Grid, ranks_of
from last_outcome import alone, outcome
from meshwise import Options, World, parallelize
from meshwise.attention.context_parallel import pattern_of_mask_function
from meshwise.attention.mask_pattern import TilePair
from meshwise.layout.layout import TokenRanges
from meshwise.testing import agree, run
from tensor.exact import with_exact_norms

transformers = pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")

TOKENS, VOCABULARY, WIDTH = 13, 23, 32
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}
BERT = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
GEMMA = {**TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5}
SOFTCAP: dict[str, Any] = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0}
SOFTCAP["attn_implementation"] = "eager"  # before 5.21 the default is sdpa, which leaves the softcap out
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5["decoder_start_token_id"] = 0
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "use_cache": False}
BART = {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
BART |= {
    f"{part}_{key}": size for part in ("encoder", "decoder") for key, size in (("ffn_dim", 48), ("attention_heads", 4))
}
BART |= {"use_cache": False, "max_position_embeddings": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", TEXT),
    "Qwen2": ("Qwen2ForCausalLM", TEXT),
    "Qwen3": ("Qwen3ForCausalLM", {**TEXT, "head_dim": 8}),
    "Mistral": ("MistralForCausalLM", {**TEXT, "sliding_window": 4, "head_dim": 8}),
    "Gemma2": ("Gemma2ForCausalLM", {**GEMMA, **SOFTCAP}),
    "Gemma3": ("Gemma3ForCausalLM", GEMMA),
    "GptOss": ("GptOssForCausalLM", {**GEMMA, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "GPT2": ("GPT2LMHeadModel", {**GPT2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "GPT2 with dropout": ("GPT2LMHeadModel", GPT2),
    "Bert": ("BertForMaskedLM", {**BERT, **NO_DROPOUT}),
    "T5": ("T5ForConditionalGeneration", T5),
    "Bart": ("BartForConditionalGeneration", BART),
}


def model_of(family: str, **more: Any) -> nn.Module:
    name, sizes = MODELS[family]
    kind = getattr(transformers, name)
    config = kind.config_class(**{**sizes, **more})
    if family == "GptOss":
        config.layer_types = ["sliding_attention", "full_attention"]
    model = kind(config)
    if family == "GptOss":
        model.set_experts_implementation("eager")
    for place, module in list(model.named_modules()):
        if type(module).__name__ in ("Gemma2RMSNorm", "Gemma3RMSNorm"):
            model.set_submodule(place, ExactGemmaNorm(module.weight.numel(), eps=module.eps))
    return with_exact_norms(model).double()


class ExactGemmaNorm(nn.Module):
    """Gemma's norm in the dtype of its input; that of transformers computes in float32."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


@cache
def batches(kind: str) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    made = []
    for _ in range(2):
        ids = torch.randint(3, VOCABULARY, (4, TOKENS), generator=draw)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if kind == "padded":
            valid = torch.arange(TOKENS) < torch.tensor([[TOKENS], [TOKENS - 4], [3], [TOKENS]])
            batch |= {"attention_mask": valid.long(), "labels": ids.masked_fill(~valid, -100)}
        if kind.startswith("pair"):
            batch["decoder_input_ids"] = ids.flip(1)
        if kind == "pair of lengths":
            batch["decoder_input_ids"], batch["labels"] = (batch[key][:, :9] for key in ("decoder_input_ids", "labels"))
        if kind == "packed":
            ends = torch.tensor([[5, 9], [2, 11], [6, 7], [1, 12]])
            places = torch.arange(TOKENS).expand(4, -1)
            starts = torch.where(places < ends[:, :1], 0, torch.where(places < ends[:, 1:], ends[:, :1], ends[:, 1:]))
            batch["position_ids"] = places - starts
        made.append(batch)
    return made


def without_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    return model(**{key: value for key, value in batch.items() if key != "labels"})


def shifted_loss(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy with the shift that tutorials write."""
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def models_own_loss(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss that transformers computes, a mean over its own labels."""
    count = (batch["labels"][:, 1:] != -100).sum()
    return output.loss * count, count


def own_loss_of_a_pair(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss that T5 and BART compute, a mean over labels that they do not shift."""
    count = (batch["labels"] != -100).sum()
    return output.loss * count, count


def plain_loss(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    return functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum"), (
        labels != -100
    ).sum()


def train(world: World, model: Callable[[], nn.Module]) -> None:
    options = Options(forward=without_loss)
    parallelize(model, "cp=2", loss=shifted_loss, world=world, options=options).step(batches("plain")[0])


def compare(
    model: Callable[[], nn.Module],
    plan: str,
    *,
    ranks: int,
    kind: str,
    loss: Any = shifted_loss,
    bound: float = 1e-9,
    reference: Callable[[], nn.Module] | None = None,
    rules: Mapping[str, str] | None = None,
) -> None:
    """Compare with one process; a `bound` above 1e-9 is for losses that transformers computes in float32.

    `rules` keep the module whole that the loss reads, so each rank counts its tokens."""
    given = Options(forward=None if loss in (models_own_loss, own_loss_of_a_pair) else without_loss, tensor_rules=rules)
    training: dict[str, Any] = {"optimizer": torch.optim.SGD if bound > 1e-9 else torch.optim.AdamW, "lr": 1e-2}

    def main(world: World) -> Any:
        trainer = parallelize(model, plan, loss=loss, world=world, options=given, **training)
        found = outcome(trainer, batches=batches(kind))
        trainer.close()
        return found

    single = alone(reference or model, loss=loss, batches=batches(kind), options=given, **training)
    single = [{**step, "tokens": step["tokens"] * (ranks if rules else 1)} for step in single]
    agree(run(ranks, main)[0], single, bound=bound)


def exact_eager(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float, softcap: float, **_: Any
) -> tuple[Tensor, None]:
    """Gemma 2's eager attention in the dtype of its input; the softmax of transformers' own is in float32."""
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
    scores = softcap * torch.tanh(q @ k.mT * scaling / softcap)
    scores = scores if mask is None else scores + mask
    return (scores.softmax(-1) @ v).transpose(1, 2), None


ALONE = ("Qwen3", "Gemma2", "Gemma3", "GptOss", "GPT2 with dropout", "Bert")
"""Of the others there are attentions in these families, or tests of their masks."""


@pytest.mark.grid(
    Grid(
        {"family": tuple(family for family in MODELS if family not in ("T5", "Bart"))},
        heavy=lambda cell: cell["family"] not in ALONE,
    )
)
def test_a_model_of_transformers_trains_as_on_one_process(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = plain_loss if family == "Bert" else shifted_loss
    monkeypatch.setattr(transformers.models.gemma2.modeling_gemma2, "eager_attention_forward", exact_eager)
    compare(lambda: model_of(family), "cp=2", ranks=2, kind="plain", loss=loss)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of peft
@pytest.mark.grid(
    Grid(
        {"use_dora": (True, False), "plan": ("cp=2", "cp=2 tp=2", "cp=2 dp=2 zero=3")},
        heavy=lambda cell: not cell["use_dora"] or cell["plan"] != "cp=2",  # DoRA has what LoRA has
        strength=1,
    )
)
def test_adapters_train_as_on_one_process(use_dora: bool, plan: str) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=3, target_modules="all-linear", use_dora=use_dora, init_lora_weights=False)
        model: nn.Module = peft.get_peft_model(model_of("Llama"), config).double()
        return model

    compare(adapted, plan, ranks=ranks_of(plan), kind="plain")


@pytest.mark.parametrize("family, context", [("Llama", "ulysses"), ("Mistral", "window"), ("Bert", "ring")])
def test_padding_masks_are_of_all_tokens(family: str, context: str) -> None:
    loss = plain_loss if family == "Bert" else shifted_loss
    compare(lambda: model_of(family), f"cp=2 context={context}", ranks=2, kind="padded", loss=loss)


def test_position_ids_that_restart_are_documents() -> None:
    compare(lambda: model_of("Mistral", use_cache=False), "cp=3 context=striped", ranks=3, kind="packed")


def test_the_loss_that_transformers_computes_is_of_the_next_token() -> None:
    # transformers computes its loss in float32
    compare(lambda: model_of("Llama"), "cp=2", ranks=2, kind="padded", loss=models_own_loss, bound=1e-6)


@pytest.mark.parametrize("plan", ["dp=1", "cp=2 context=window"])
def test_flex_attention_of_transformers_trains_on_a_cpu(plan: str, pytestconfig: pytest.Config) -> None:
    if plan == "dp=1" and pytestconfig.getoption("--on") == "gpu":
        pytest.skip("on a GPU, without cp, torch's own FlexAttention runs")

    def model() -> nn.Module:
        return model_of("Mistral", attn_implementation="flex_attention")

    compare(model, plan, ranks=int(plan[3]), kind="padded", reference=lambda: model_of("Mistral"))


def test_a_mask_of_transformers_without_a_pattern_of_its_own_is_evaluated() -> None:
    masks = transformers.masking_utils
    function = masks.chunked_causal_mask_function(4, torch.tensor([0, 1]))
    [tile] = TokenRanges.whole(TOKENS).tiles(TOKENS)
    cpu = torch.device("cpu")
    mask = pattern_of_mask_function(function, samples=2, device=cpu).mask(TilePair(tile, tile), device=cpu)
    sizes = {"batch_size": 2, "q_length": TOKENS, "kv_length": TOKENS}
    assert mask.expand(2, 1, TOKENS, TOKENS).equal(
        masks.sdpa_mask(**sizes, mask_function=function, allow_is_causal_skip=False)
    )


def test_gradient_checkpointing_of_transformers_repeats_the_attention_over_all_tokens() -> None:
    def model() -> nn.Module:
        made: Any = model_of("GPT2 with dropout", use_cache=False)
        newer = hasattr(made, "activation_checkpointing_enable")
        (made.activation_checkpointing_enable if newer else made.gradient_checkpointing_enable)()
        return made  # type: ignore[no-any-return]

    compare(model, "cp=2", ranks=2, kind="plain")


@pytest.mark.grid(
    Grid(
        {"plan": ("cp=3 context=striped", "cp=2 context=ulysses zero=3", "cp=2 tp=2")},
        heavy=lambda cell: "ulysses" not in cell["plan"],  # the test of labels has rings
    )
)
def test_a_relative_bias_is_of_all_positions(plan: str) -> None:
    compare(lambda: model_of("T5"), plan, ranks=4 if "tp" in plan else int(plan[3]), kind="pair", loss=plain_loss)


@pytest.mark.parametrize("family, plan", [("T5", "cp=3 context=striped"), ("Bart", "cp=2")])
def test_a_decoder_gets_the_labels_shifted_over_all_tokens(family: str, plan: str) -> None:
    given: dict[str, Any] = {"kind": "padded", "loss": own_loss_of_a_pair}
    compare(lambda: model_of(family), plan, ranks=int(plan[3]), **given)


def test_another_shift_of_labels_is_refused() -> None:
    def shifting(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        shifted = torch.zeros_like(batch["labels"])
        shifted[:, 1:] = batch["labels"][:, :-1]
        return model(input_ids=batch["input_ids"], decoder_input_ids=shifted)

    with pytest.raises(
        ValueError, match=r"an assignment to \[1:\] .*put decoder_input_ids into the batch.* mixes tokens"
    ):
        run(
            2,
            lambda world: parallelize(
                lambda: model_of("T5"), "cp=2", loss=plain_loss, world=world, options=Options(forward=shifting)
            ).step(batches("plain")[0]),
        )


def test_a_decoder_of_another_length_is_kept_whole_by_the_rule_of_the_message() -> None:
    def decode(rules: Mapping[str, str] | None) -> None:
        given: dict[str, Any] = {"ranks": 2, "kind": "pair of lengths", "loss": plain_loss, "rules": rules}
        compare(lambda: model_of("T5"), "cp=2", **given)

    with pytest.raises(ValueError, match=r'attention of 9 queries, but this rank has \d of 13 tokens.*"tokens whole"'):
        decode(None)
    decode({"decoder": "tokens whole"})
