"""Test models with adapters of PEFT under every plan that allows them, against one process."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from expert.exact_casts import ExactCasts
from grid import Grid, ranks_of
from last_outcome import alone, outcome
from meshwise.checkpoint.hugging_face import ADAPTER, export
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan, PlanError
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, run

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of peft

TARGETS = ["qkv", "projection", "expansion", "contraction"]


def build(**settings: Any) -> nn.Module:
    shape = GPTConfig(vocabulary=16, context=8, layers=2, heads=4, width=16, mlp_ratio=2, bias=True)
    given = {"r": 3, "lora_alpha": 6, "target_modules": TARGETS, **settings}
    torch.manual_seed(0)
    model: nn.Module = peft.get_peft_model(GPT(shape).double(), peft.LoraConfig(**given))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model.double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(16, (rows, 9), generator=generator) for rows in (6, 5, 4)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def made(world: World, plan: str, **settings: Any) -> Trainer:
    model = functools.partial(build, **settings)()
    return parallelize(model, plan, world=world, loss=next_token_loss, options=Options(example=batches()[0]), lr=1e-2)


@functools.cache
def expected() -> Any:
    return alone(build(), loss=next_token_loss, batches=batches(), lr=1e-2)


PLANS = Grid(
    {
        "split": ("dp=2", "tp=2", "tp=4", "dp=2 tp=2", "pp=2 microbatches=2", "pp=2 tp=2 microbatches=2"),
        "zero": (0, 1, 3),
        "recompute": ("none", "full"),
    },
    strength=1,
    heavy=lambda cell: ranks_of(cell["split"]) > 2 and cell["split"] != "tp=4",  # as with each kind of adapter
)


@pytest.mark.grid(PLANS)
def test_adapters_train_as_on_one_process(split: str, zero: int, recompute: str) -> None:
    plan = f"{split} zero={zero} recompute={recompute}"
    for one in run(Plan.parse(plan).mesh().size, lambda world: outcome(made(world, plan), batches=batches())):
        agree(one, expected(), bound=1e-9)


@pytest.mark.parametrize(
    "plan, settings, message",
    [
        ("tp=2 sequence_parallel=1", {}, "sequence_parallel=0"),
        ("tp=4 tp_mode=2d", {}, "use tp_mode=1d"),
        ("tp=2", {"use_dora": True, "lora_dropout": 0.1}, "use lora_dropout=0, or tp=1"),
        ("tp=2", {"use_dora": True, "lora_dropout": 0.1, "target_modules": ["qkv"]}, "use lora_dropout=0, or tp=1"),
        ("tp=2", {"target_modules": ["head"]}, "a matrix that is 'single'.* other target_modules"),
    ],
)
def test_adapters_that_cannot_be_split_are_refused(plan: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        run(Plan.parse(plan).mesh().size, lambda world: made(world, plan, **settings))


def randomized(model: nn.Module) -> nn.Module:
    """Give adapters values that are neither 0 nor 1, as after some training."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = parameter.data.double() + 0.3 * drawn
    return model.double()


KINDS = {
    "dropout": peft.LoraConfig(r=3, target_modules=TARGETS, lora_dropout=0.2),
    "bias": peft.LoraConfig(r=3, target_modules=TARGETS, lora_bias=True),
    "DoRA": peft.LoraConfig(r=3, target_modules=TARGETS, use_dora=True),
    "IA3": peft.IA3Config(target_modules=TARGETS, feedforward_modules=["contraction"]),
    "IA3 on first matrices": peft.IA3Config(target_modules=TARGETS, feedforward_modules=["qkv", "expansion"]),
}
EVERY = ("dp=2 zero=3", "tp=4 zero=1", "dp=2 tp=2 zero=3 recompute=full", "pp=2 tp=2 microbatches=2", "cp=2")


@pytest.mark.grid(Grid({"kind": tuple(KINDS), "plan": EVERY}, strength=1))
def test_each_kind_of_adapter_trains_as_on_one_process(kind: str, plan: str) -> None:
    def adapted() -> nn.Module:
        torch.manual_seed(0)
        shape = GPTConfig(vocabulary=16, context=8, layers=2, heads=4, width=16, mlp_ratio=2, bias=True)
        return randomized(peft.get_peft_model(GPT(shape), KINDS[kind]))

    def main(world: World) -> Any:
        options = Options(example=batches()[0])
        trainer = parallelize(adapted(), plan, world=world, loss=next_token_loss, options=options, lr=1e-2)
        return outcome(trainer, batches=batches())

    single = alone(adapted(), loss=next_token_loss, batches=batches(), lr=1e-2)
    for one in run(Plan.parse(plan).mesh().size, main):
        agree(one, single, bound=1e-9)


def llama(config: Any) -> nn.Module:
    """Return a Llama with adapters; the base has the same values at every call."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = transformers.LlamaConfig(vocab_size=40, num_key_value_heads=2, use_cache=False, **shape)
    model: nn.Module = peft.get_peft_model(transformers.LlamaForCausalLM(settings), config)
    return model


OF_LLAMA = {
    "LoRA": peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    "DoRA": peft.LoraConfig(r=2, target_modules=["v_proj", "down_proj"], use_dora=True, task_type="CAUSAL_LM"),
    "IA3": peft.IA3Config(task_type="CAUSAL_LM"),
    "head": peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    "prompts": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "P-tuning": peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, task_type="CAUSAL_LM"),
}


def prompted(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits of the batch's tokens, without those of learned prompts; computed in float64."""
    with ExactCasts():
        logits: Tensor = model(input_ids=batch["input_ids"]).logits
    return logits[:, logits.size(1) - batch["targets"].size(1) :]


def of_llama(rows: int) -> dict[str, Tensor]:
    tokens = torch.randint(40, (rows, 9), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


@pytest.mark.grid(
    Grid(
        {"kind": tuple(OF_LLAMA), "plan": ("dp=2 zero=3", "pp=2 tp=2 microbatches=2")},
        cost=lambda cell: ranks_of(cell["plan"]),
        strength=1,
    )
)
def test_adapters_of_a_llama_train_as_on_one_process(kind: str, plan: str) -> None:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> Any:
        return next_token_loss(output, (batch["input_ids"], batch["targets"]))

    def main(world: World) -> Any:
        trainer = parallelize(build(), plan, world=world, loss=loss, options=options, lr=1e-2)
        return outcome(trainer, batches=[of_llama(5), of_llama(4)])

    build: Callable[[], nn.Module] = lambda: randomized(llama(OF_LLAMA[kind]))  # noqa: E731
    options = Options(example=of_llama(5), forward=prompted)
    single = alone(build(), loss=loss, batches=[of_llama(5), of_llama(4)], lr=1e-2, options=options)
    for one in run(Plan.parse(plan).mesh().size, main):
        agree(one, single, bound=1e-9)


@pytest.mark.parametrize(
    "plan, config, message",
    [
        ("tp=2", peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "use tp=1, or PromptTuning"),
        ("cp=2", OF_LLAMA["prompts"], "use cp=1, or LoRA"),
    ],
)
def test_prompts_that_cannot_be_split_are_refused(plan: str, config: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        run(2, lambda world: parallelize(llama(config), plan, world=world, loss=next_token_loss, lr=1e-2))


@pytest.mark.grid(
    Grid(
        {"kind": tuple(OF_LLAMA), "plan": ("tp=2", "dp=2 zero=3", "pp=2 microbatches=2")},
        exists=lambda cell: cell["kind"] == "LoRA" or cell["plan"] == "tp=2",
        # Of matrices, and of prompts, one kind is read back as the other.
        heavy=lambda cell: cell["kind"] in ("DoRA", "P-tuning") or cell["plan"] == "dp=2 zero=3",
    )
)
def test_adapters_are_exported_alone_or_merged_and_read_back(kind: str, plan: str, tmp_path: Path) -> None:
    def loss(output: Tensor, batch: Any) -> Any:
        return next_token_loss(output, (batch["input_ids"], batch["targets"]))

    def forward(model: Any, batch: Any) -> Tensor:
        logits: Tensor = model(input_ids=batch["input_ids"]).logits
        return logits[:, logits.size(1) - batch["targets"].size(1) :]

    def main(world: World) -> dict[str, Tensor]:
        options = Options(example=of_llama(4), forward=forward)
        trainer = parallelize(build(), plan, world=world, loss=loss, options=options, lr=1e-2)
        trainer.step(of_llama(4))
        trainer.save(tmp_path / "step-1")
        trainer.save_pretrained(tmp_path / "saved")
        return trainer.state_dict()

    build: Callable[[], Any] = lambda: llama(OF_LLAMA[kind])  # noqa: E731
    state = run(2, main)[0]
    done = export(tmp_path / "step-1", into=tmp_path / "adapters", build=build)
    assert {ADAPTER, "adapter_config.json"} <= {path.name for path in done.files}
    assert "model.safetensors" not in {path.name for path in done.files}
    learned = OF_LLAMA[kind].is_prompt_learning
    for folder in ("adapters", "saved"):
        base = build().get_base_model() if learned else build().unload()
        model = peft.PeftModel.from_pretrained(base, tmp_path / folder)
        trained = [name for name, one in build().named_parameters() if one.requires_grad and "prompt" not in name]
        for name in trained:
            assert torch.equal(model.state_dict()[name], state[name]), name
        tokens, expected = of_llama(4)["input_ids"], build()
        expected.load_state_dict(state)
        assert torch.equal(model.eval()(input_ids=tokens).logits, expected.eval()(input_ids=tokens).logits)
    if learned:
        with pytest.raises(ValueError, match="learned prompts are inputs"):
            export(tmp_path / "step-1", into=tmp_path / "merged", build=build, merge=True)
        return
    merged = export(tmp_path / "step-1", into=tmp_path / "merged", build=build, merge=True)
    assert {"model.safetensors", "config.json"} <= {path.name for path in merged.files}
    assert merged.difference < 1e-6


def test_a_failed_export_of_adapters_leaves_nothing(tmp_path: Path) -> None:
    def main(world: World) -> None:
        made(world, "dp=1").save(tmp_path / "step-1")

    run(1, main)
    calls: list[int] = []

    def other() -> nn.Module:
        """The second one, from which the base is taken, has another head."""
        calls.append(len(calls))
        model = build()
        if len(calls) == 2:
            model.get_submodule("base_model.model.norm").register_forward_hook(
                lambda _module, _args, output: output + 1
            )
        return model

    with pytest.raises(RuntimeError, match="nothing was written"):
        export(tmp_path / "step-1", into=tmp_path / "out", build=other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
