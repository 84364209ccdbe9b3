"""Folders of Hugging Face load under any plan, and exports have the same layout and names."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from meshwise.checkpoint.checkpoint_format import DamageError
from meshwise.checkpoint.hugging_face import PARTS, WHOLE, ExportError, export
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.reference import GPT, GPTConfig
from meshwise.testing import run

transformers = pytest.importorskip("transformers")


def llama(*, dtype: torch.dtype = torch.float32) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config).to(dtype)
    return model


def gpt2() -> nn.Module:
    """A model whose output is tied to its embedding."""
    config = transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=4)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


BUILDS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2}


def loss(output: Any, batch: Tensor) -> tuple[Tensor, int]:
    logits = output.logits.flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch.flatten(), reduction="sum"), batch.numel()


def forward(model: nn.Module, batch: Tensor) -> Any:
    return model(batch)


TOKENS = torch.arange(32).view(4, 8)


def keep(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="8KB")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, nn.Module]]:
    """Each model in several files, and the model."""
    root = tmp_path_factory.mktemp("pretrained")
    made = {}
    for name, build in BUILDS.items():
        torch.manual_seed(3)
        model = build()
        keep(model, root / name)
        assert (root / name / PARTS).exists()
        made[name] = root / name, model
    return made


def load(world: World, build: Callable[[], nn.Module], plan: str, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    training = parallelize(build, plan, loss=loss, world=world, lr=1e-2)
    extra = training.load(folder)
    return extra, {name: value.clone() for name, value in training.full_parameters()}


@pytest.mark.parametrize("plan,ranks", [("dp=1", 1), ("dp=3 zero=3", 3), ("dp=2 zero=1", 2), ("tp=2 dp=2 zero=3", 4)])
@pytest.mark.parametrize("name", BUILDS)
def test_a_folder_in_parts_loads_under_any_plan(
    name: str, plan: str, ranks: int, folders: dict[str, tuple[Path, nn.Module]]
) -> None:
    folder, model = folders[name]
    expected = dict(model.named_parameters())
    for extra, parameters in run(ranks, load, args=(BUILDS[name], plan, folder)):
        assert extra == {"unused": []}
        assert parameters.keys() == expected.keys()
        for key, value in parameters.items():
            assert torch.equal(value, expected[key]), key


def test_a_folder_of_the_model_without_its_head_is_found_by_its_prefix(tmp_path: Path) -> None:
    torch.manual_seed(4)
    bare = transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=4)
    )
    keep(bare, tmp_path / "bare")
    [(_, parameters)] = run(1, load, args=(gpt2, "dp=1", tmp_path / "bare"))
    for name, value in bare.named_parameters():
        assert torch.equal(parameters[f"transformer.{name}"], value), name


def refused(world: World, build: Callable[[], nn.Module], folder: Path, error: type[Exception]) -> str:
    training = parallelize(build, "dp=2 zero=1", loss=loss, world=world)
    before = [value.clone() for _, value in training.full_parameters()]
    with pytest.raises(error) as caught:
        training.load(folder)
    assert all(torch.equal(*pair) for pair in zip(before, (v for _, v in training.full_parameters()), strict=True))
    return str(caught.value)


def test_another_model_is_refused_by_name(folders: dict[str, tuple[Path, nn.Module]]) -> None:
    for message in run(2, refused, args=(gpt2, folders["llama"][0], ValueError)):
        assert "lacks parameters that the model has: transformer.wpe.weight, transformer.ln_f.weight" in message


def test_a_name_in_a_weight_map_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / PARTS).write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    for message in run(2, refused, args=(gpt2, tmp_path, DamageError)):
        assert "plain name" in message


def train_and_save(world: World, build: Callable[[], nn.Module], plan: str, folder: Path) -> dict[str, Tensor]:
    training = parallelize(build, plan, loss=loss, world=world, lr=1e-2)
    training.step(TOKENS)
    training.save(folder)
    return {name: value.clone() for name, value in training.full_parameters()}


@pytest.mark.parametrize("name", BUILDS)
def test_an_export_has_the_layout_and_names_that_transformers_reads(name: str, tmp_path: Path) -> None:
    build = BUILDS[name]
    plan = "dp=2 zero=3"
    expected = run(2, train_and_save, args=(build, plan, tmp_path / "step-1"))[0]
    done = export(tmp_path / "step-1", into=tmp_path / "out", build=build)
    assert done.difference == 0
    kind: Any = type(build())
    model, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for key, value in model.named_parameters():
        assert torch.equal(value, expected[key]), key
    again = run(2, load, args=(build, "dp=2 zero=2", tmp_path / "out"))[0][1]
    assert all(torch.equal(again[key], value) for key, value in expected.items())


def mixture(kind: str) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_local_experts": 4} if kind == "mixtral" else {"num_experts": 4, "moe_intermediate_size": 8}
    sizes |= {"num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 8, **experts}
    config = transformers.AutoConfig.for_model(kind, vocab_size=40, **sizes)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize(
    "kind,one_of_an_expert",
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w1.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.gate_proj.weight"),
    ],
)
def test_a_mixture_is_exported_with_the_tensors_of_each_expert(
    kind: str, one_of_an_expert: str, tmp_path: Path
) -> None:
    build = partial(mixture, kind)
    expected = run(2, train_and_save, args=(build, "dp=2 ep=2", tmp_path / "step-1"))[0]
    export(tmp_path / "step-1", into=tmp_path / "out", build=build)
    with safe_open(tmp_path / "out" / WHOLE, "pt") as file:
        assert one_of_an_expert in file.keys()  # noqa: SIM118 - no mapping
    again = run(2, load, args=(build, "dp=2 ep=2 zero=3", tmp_path / "out"))[0][1]
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[key], value) for key, value in expected.items())


def test_a_model_whose_published_names_differ_more_keeps_its_own(tmp_path: Path) -> None:
    """transformers joins and renames tensors of GPT-NeoX, which a load under a plan does not."""

    def build() -> nn.Module:
        config = transformers.GPTNeoXConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
        model: nn.Module = transformers.GPTNeoXForCausalLM(config)
        return model

    expected = run(2, train_and_save, args=(build, "dp=2", tmp_path / "step-1"))[0]
    export(tmp_path / "step-1", into=tmp_path / "out", build=build)
    again = run(2, load, args=(build, "dp=2", tmp_path / "out"))[0][1]
    assert all(torch.equal(again[key], value) for key, value in expected.items())


def test_a_bf16_model_is_exported_in_bf16(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return llama(dtype=torch.bfloat16)

    expected = run(2, train_and_save, args=(build, "dp=2 zero=1", tmp_path / "step-1"))[0]
    export(tmp_path / "step-1", into=tmp_path / "out", build=build)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    for key, value in model.named_parameters():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, expected[key]), key


def plain() -> nn.Module:
    return GPT(GPTConfig(vocabulary=40, context=16, layers=1, heads=2, width=8, tied=True))


def plain_loss(logits: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()


def save_plain(world: World, folder: Path) -> None:
    training = parallelize(plain, "dp=2", loss=plain_loss, world=world)
    training.step(TOKENS)
    training.save(folder)


def test_a_model_from_elsewhere_than_transformers_is_exported_and_checked(tmp_path: Path) -> None:
    run(2, save_plain, args=(tmp_path / "step-1",))
    done = export(tmp_path / "step-1", into=tmp_path / "out", build=plain)
    assert [path.name for path in done.files] == ["model.safetensors"]
    with pytest.raises(FileExistsError):
        export(tmp_path / "step-1", into=tmp_path / "out", build=plain)
    with pytest.raises(ValueError, match="shape"):
        export(
            tmp_path / "step-1",
            into=tmp_path / "other",
            build=lambda: GPT(GPTConfig(vocabulary=40, context=16, layers=1, heads=2, width=16, tied=True)),
        )


class Shop(nn.Module):
    """A model with an embedding that takes more than tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8)
        self.head = nn.Linear(10, 1)

    def forward(self, numbers: Tensor, dense: Tensor) -> Tensor:
        result: Tensor = self.head(torch.cat([self.table(numbers), dense], -1))
        return result


class Pictures(nn.Module):
    """A model without an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)


@pytest.mark.parametrize(
    "build, why", [(Shop, "given only tokens, it raises TypeError: .*'dense'"), (Pictures, "it has no embedding")]
)
def test_a_model_whose_export_cannot_be_checked_is_refused_and_nothing_is_written(
    build: Callable[[], nn.Module], why: str, tmp_path: Path
) -> None:
    def main(world: World) -> None:
        parallelize(build, "dp=1", loss=plain_loss, world=world).save(tmp_path / "one")

    run(1, main)
    with pytest.raises(ValueError, match=f"nothing was written: {why}.*parameters.safetensors of the run"):
        export(tmp_path / "one", into=tmp_path / "out", build=build)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("build", [plain, llama])
def test_a_full_disk_leaves_no_part_of_an_export_and_the_next_export_works(
    build: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    if build is plain:
        run(2, save_plain, args=(tmp_path / "step-1",))
    else:
        run(2, train_and_save, args=(build, "dp=2", tmp_path / "step-1"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device"):
            export(tmp_path / "step-1", into=tmp_path / "out", build=build)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"latest", "step-1"})
    export(tmp_path / "step-1", into=tmp_path / "out", build=build)


def test_an_export_with_other_logits_is_an_error(tmp_path: Path) -> None:
    run(2, save_plain, args=(tmp_path / "step-1",))
    built: list[nn.Module] = []

    def build() -> nn.Module:
        """The second one, into which the export is read, has an output of its own."""
        built.append(plain())
        if len(built) == 2:
            built[1].get_submodule("norm").register_forward_hook(lambda _module, _args, output: output + 1)
        return built[-1]

    with pytest.raises(ExportError, match="differ"):
        export(tmp_path / "step-1", into=tmp_path / "out", build=build)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


def test_a_model_with_an_encoder_and_a_decoder_is_exported(tmp_path: Path) -> None:
    shape = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "vocab_size": 11}

    def t5() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape))
        return model

    def main(world: World) -> None:
        parallelize(t5, "dp=1", loss=loss, world=world, lr=1e-2).save(tmp_path / "one")

    run(1, main)
    exported = export(tmp_path / "one", into=tmp_path / "folder", build=t5)
    assert exported.difference == 0
    assert {"config.json", "model.safetensors"} <= {file.name for file in exported.files}
