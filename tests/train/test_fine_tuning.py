"""Fine-tuning of models of transformers from a job alone: records, chats, packed rows, LoRA, and their errors."""

from __future__ import annotations

import gzip
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from grid import Cell, Grid
from meshwise.cli.main import main
from meshwise.model.deferred_init import build_with_values, is_quantized
from meshwise.plan import Plan, PlanError
from meshwise.train.fine_tuning_data import load_rows
from meshwise.train.flags_and_toml import from_toml, to_toml
from meshwise.train.job_settings import DataJob, Job, JobError, ModelJob, OptimizerJob, ScheduleJob, TrainJob
from meshwise.train.prepare_job import check_plan, prepare
from meshwise.train.pretrained_model import check_rows_fit
from run_job import run_job

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # of peft
    pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning"),  # of tokenizers
]

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>"
    "{% endgeneration %}{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)
FORGETFUL = "{% for m in messages %}{% if loop.last %}<{{ m.role }}>{% endif %}{{ m.content }}{% endfor %}"
CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "six"},
]


def write_tokenizer(folder: Path, *, template: str | None = PLAIN) -> Any:
    """One token for each byte, and three of two letters that are learned."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=261, special_tokens=["<eos>", "<s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["six four six four"], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", bos_token="<s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "llama"
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=264, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


def many(path: Path) -> Path:
    """Records of all kinds and of many lengths."""
    numbers = [{"prompt": f"after {i} comes ", "completion": f"{i + 1}" * (1 + i % 3)} for i in range(12)]
    return write_lines(path, *numbers, *({"text": "six" * (1 + i % 4)} for i in range(12)), {"messages": CHAT})


def data_job(lines: Path, folder: Path, **settings: Any) -> DataJob:
    given = {
        "dataset": f"json:{lines}",
        "tokenizer": f"hf:{folder}",
        "cache": str(lines.parent / "cache"),
        "context": 24,
    }
    return DataJob(**{**given, "validation": 0, **settings})


def tuning_job(folder: Path, model: Path, *, plan: str = "dp=1", lora: Any = None, steps: int = 3, **data: Any) -> Job:
    return Job(
        plan=Plan.parse(plan),
        model=ModelJob(name=f"hf:{model}", lora=lora or {}),
        data=data_job(many(folder / "lines.jsonl"), model, **data),
        optimizer=OptimizerJob(name="Adam", lr=1e-2),
        schedule=ScheduleJob(shape="constant"),
        train=TrainJob(steps=steps, batch=6, output=str(folder / "run"), save_every=steps, dtype="float64"),
    )


def documents(batch: dict[str, Tensor]) -> Any:
    """Each record of a batch alone, with its targets: no attention across can be left."""
    for row, inputs in enumerate(batch["input_ids"]):
        if "attention_mask" in batch:
            length = int(batch["attention_mask"][row].sum())
            yield inputs[:length], batch["targets"][row, :length]
        else:
            starts = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()
            for start, stop in zip(starts, [*starts[1:], len(inputs)], strict=True):
                yield inputs[start:stop], batch["targets"][row, start:stop]


def train_plainly(model: nn.Module, batches: Any) -> list[float]:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for batch in batches:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for inputs, targets in documents(batch):
            logits = model(input_ids=inputs[None]).logits[0]
            total = total + cross_entropy(logits, targets, reduction="sum")
            count += int((targets != -100).sum())
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach() / count))
    return losses


KINDS = {"padded": (False, False), "packed": (True, False), "packed lora": (True, True)}
DATA: dict[str, dict[str, Any]] = {
    "records": {},
    "sorted": {"collator": "pad", "bucket_by_length": 2, "collator_arguments": {"multiple": 4}},
    "own": {"collator": "pack", "dataset": f"{__file__}:own_samples"},
}


def exists(cell: Cell) -> bool:
    if cell["data"] == "records":
        return bool(cell["plan"] != "dp=2" and (cell["plan"] != "cp=2" or cell["kind"] == "packed"))
    plans: dict[str, tuple[str, ...]] = {"sorted": ("dp=2 zero=3", "cp=2"), "own": ("dp=2",)}
    return bool(cell["kind"] == "padded" and cell["plan"] in plans[cell["data"]])


PLANS = ("dp=2 zero=3", "tp=2", "pp=2 microbatches=2", "cp=2", "dp=2")
CELLS = Grid({"plan": PLANS, "kind": tuple(KINDS), "data": tuple(DATA)}, exists=exists, strength=1)


def own_tokens() -> list[dict[str, Any]]:
    return [{"input_ids": one["input_ids"]} for one in own_samples()]


def own_samples() -> list[dict[str, Any]]:
    """Samples of many lengths, as a tokenizer of a user makes them."""
    return [{"input_ids": [i % 7 + 1, *range(i % 9 + 1)], "labels": [-100, *range(i % 9 + 1)]} for i in range(12)]


@pytest.mark.grid(CELLS)
def test_a_job_trains_as_plain_torch_does_on_each_record_alone(
    plan: str,
    kind: str,
    data: str,
    pretrained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The norm of transformers computes in float32, which hides what a plan does below 1e-7.
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "LlamaRMSNorm", nn.RMSNorm)
    pack, lora = KINDS[kind]
    adapters = {"r": 2, "target_modules": ["q_proj", "down_proj"]} if lora else None
    job = tuning_job(tmp_path, pretrained, plan=plan, pack=pack, lora=adapters, **DATA[data])
    model = transformers.AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float64)
    prepared = prepare(job, ranks=2)
    if adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **adapters)).double()
        source = build_with_values(prepared.model, seed=0)
        with torch.no_grad():  # the same random A
            for name, parameter in model.named_parameters():
                assert torch.equal(source.full(name), parameter) or "lora_A" in name
                parameter.copy_(source.full(name))
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    losses = train_plainly(model, prepared.batches(3))

    run_job(job)
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [event["loss"] for event in events if event["event"] == "step"] == pytest.approx(losses, rel=1e-9)
    trained = load_file(tmp_path / "run" / "parameters.safetensors")
    assert trained.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        expected = parameter.detach()
        assert float((trained[name] - expected).abs().max()) <= 1e-9 * float(expected.abs().max()), name
        assert parameter.requires_grad or torch.equal(expected, start[name]), name


def test_a_collator_of_transformers_draws_the_same_masks_under_every_plan(pretrained: Path, tmp_path: Path) -> None:
    name = "hf:DataCollatorForLanguageModeling"
    arguments = {"mlm_probability": 0.4, "mask_replace_prob": 0.0, "random_replace_prob": 1.0}
    fast = transformers.AutoTokenizer.from_pretrained(pretrained)
    fast.add_special_tokens({"mask_token": "<mask>", "pad_token": "<eos>"})
    fast.save_pretrained(tmp_path / "masking")
    data: dict[str, Any] = {
        "collator": name,
        "collator_arguments": arguments,
        "dataset": f"{__file__}:own_tokens",
        "tokenizer": f"hf:{tmp_path}/masking",
    }
    first, second = (prepare(tuning_job(tmp_path, pretrained, plan=plan, **data), ranks=2) for plan in ("dp=2", "tp=2"))
    for one, other in zip(first.batches(2), second.batches(2), strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert (one["labels"] >= 0).any()


def quantized(folder: Path, model: Path, kind: Any, *, plan: str = "dp=1") -> Job:
    job = tuning_job(folder, model, plan=plan, pack=True, lora={"r": 2, "target_modules": ["q_proj", "down_proj"]})
    return replace(job, model=replace(job.model, quantization=kind), train=replace(job.train, dtype=None))


@pytest.mark.parametrize(
    "kind,library", [("nf4", "bitsandbytes"), ("int8", "bitsandbytes"), ("torchao-int8", "torchao")]
)
@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_adapters_of_a_quantized_model_train_as_in_plain_torch_and_are_exported(
    kind: Any, library: str, tmp_path: Path
) -> None:
    """In float32, in which the libraries multiply; their matrices need 64 features or more."""
    pytest.importorskip(library)
    config = transformers.LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    job = quantized(tmp_path, folder, kind, plan="dp=2 zero=3")
    prepared = prepare(job, ranks=2)
    model: Any = prepared.model
    assert sum(is_quantized(parameter) for parameter in model.parameters()) == 14, "the head stays as it is"
    losses = train_plainly(model, prepared.batches(3))
    summary, _ = run_job(job)
    assert summary.loss == pytest.approx(losses[-1], rel=1e-2 if kind == "int8" else 1e-5)
    place = str(tmp_path / "run/checkpoints/step-3")
    assert main(["checkpoint", "export", place, str(tmp_path / "out")]) == 0
    assert main(["checkpoint", "export", place, str(tmp_path / "merged"), "--merge"]) == 2
    exported = load_file(tmp_path / "out" / "adapter_model.safetensors")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and kind != "int8":
            found = exported[name.replace(".default", "")]
            assert float((found - parameter).detach().abs().max()) <= 2e-3, name  # Adam's signs of noise
    with pytest.raises(PlanError, match=r"would split the quantized .*q_proj.base_layer.weight"):
        run_job(replace(job, plan=Plan.parse("tp=2")))


def test_quantization_needs_its_library_and_adapters(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, module, extra in (
        ("nf4", "bitsandbytes", "bitsandbytes"),
        ("torchao-int8", "torchao.quantization", "torchao"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(JobError, match=rf"model.quantization needs a library: .*pip install 'meshwise\[{extra}\]'"):
            prepare(quantized(tmp_path, pretrained, kind), ranks=1)
    with pytest.raises(JobError, match=r"model.quantization = \"nf4\" trains adapters alone; add lora = \{r = 8\}"):
        ModelJob("hf:a", quantization="nf4")
    assert main(["verify", write_job(quantized(tmp_path, pretrained, "nf4"), tmp_path / "job.toml")]) == 2
    assert "verify computes in float64, and model.quantization does not" in capsys.readouterr().err


# ---- records -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(pretrained: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(pretrained)


def shown(row: dict[str, Tensor], tokenizer: Any) -> tuple[str, str]:
    """The text of a row, and its targets with dots for tokens without a loss."""
    text, targets = (
        tokenizer.convert_ids_to_tokens(row[key].clamp(min=0).tolist()) for key in ("input_ids", "targets")
    )
    counted = (token if target >= 0 else "." for token, target in zip(targets, row["targets"].tolist(), strict=True))
    return " ".join(text), " ".join(counted)


def test_records_are_packed_in_their_order_with_targets_inside_each(
    pretrained: Path, tokenizer: Any, tmp_path: Path
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", {"text": "abc"}, "", {"prompt": "12", "completion": "34"}, {"text": "z"})
    rows = load_rows(data_job(lines, pretrained, context=12, pack=True)).train
    assert len(rows) == 1
    assert shown(rows[0], tokenizer) == (
        "a b c <eos> 1 2 3 4 <eos> z <eos> <eos>",
        "b c <eos> . . 3 4 <eos> . <eos> . .",
    )
    assert rows[0]["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 0]

    rows = load_rows(data_job(lines, pretrained, context=6)).train
    assert [shown(rows[i], tokenizer)[1] for i in range(3)] == ["b c <eos> . . .", ". 3 4 <eos> . .", "<eos> . . . . ."]
    assert [rows[i]["attention_mask"].sum().item() for i in range(3)] == [4, 5, 2]
    assert torch.equal(pickle.loads(pickle.dumps(rows))[1]["targets"], rows[1]["targets"])


def test_a_token_across_the_border_of_prompt_and_completion_is_learned(
    pretrained: Path, tokenizer: Any, tmp_path: Path
) -> None:
    across = next(word for word in ("si", "ix", "fo", "ou", "ur") if len(tokenizer(word).input_ids) == 1)
    lines = write_lines(tmp_path / "a.jsonl", {"prompt": f"12{across[0]}", "completion": across[1]})
    row = load_rows(data_job(lines, pretrained, context=5)).train[0]
    assert shown(row, tokenizer) == (f"1 2 {across} <eos> <eos>", f". {across} <eos> . .")


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_the_loss_of_a_chat_is_on_its_answers(template: str, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template=template)
    lines = write_lines(tmp_path / "chats.jsonl", {"messages": CHAT, "id": 7})
    row = load_rows(data_job(lines, tmp_path / "tokenizer", context=99)).train[0]
    told = row["targets"][row["targets"] >= 0]
    assert tokenizer.decode(told) == "four<eos>six<eos>"
    assert tokenizer.decode(row["input_ids"][row["attention_mask"] == 1]).startswith(
        "<user>2+2?<eos><assistant>four<eos>"
    )


@pytest.mark.parametrize("overlong,kept", [("truncate", "a b c d"), ("drop", None), ("split", "a b c d e f")])
def test_a_record_that_exceeds_the_context_is_cut_or_left_out_and_counted(
    overlong: str, kept: str | None, pretrained: Path, tokenizer: Any, tmp_path: Path
) -> None:
    lines = write_lines(
        tmp_path / "a.jsonl", {"text": "abcdef"}, {"text": "xy"}, {"prompt": "12345", "completion": "6"}
    )
    found = load_rows(data_job(lines, pretrained, context=4, overlong=overlong))
    rows = [shown(found.train[i], tokenizer)[0] for i in range(len(found.train))]
    text = " ".join(rows).replace(" <eos>", "")
    assert text == " ".join(filter(None, [kept, "x y", "5 6" if overlong == "split" else ""]))
    left_out = {"truncate": 1, "drop": 2, "split": 0}[overlong]  # the answer begins behind the context
    assert f"3 records of 17 tokens, 2 longer than 4 ({overlong}), {left_out} left out" in found.summary


def test_tokens_are_kept_until_data_or_tokenizer_change(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    lines = write_lines(tmp_path / "chats.jsonl", {"messages": CHAT})
    first = load_rows(data_job(lines, tmp_path / "tokenizer"))
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 1
    packed = load_rows(data_job(lines, tmp_path / "tokenizer", pack=True, context=9, overlong="split"))
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 1
    assert packed.content == first.content

    write_tokenizer(tmp_path / "tokenizer", template=MARKED)
    load_rows(data_job(lines, tmp_path / "tokenizer"))
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 2
    write_lines(lines, {"messages": CHAT[:2]})
    assert load_rows(data_job(lines, tmp_path / "tokenizer")).content != first.content


def test_shards_and_fields_of_other_names_are_read(pretrained: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "part-1.jsonl", {"content": "one"})
    with gzip.open(tmp_path / "part-2.jsonl.gz", "wt") as file:
        file.write('{"content": "two"}\n')
    found = load_rows(data_job(tmp_path / "part-*", pretrained, arguments={"text": "content"}))
    assert len(found.train) == 2


def test_parquet_and_saved_datasets_are_read(pretrained: Path, tmp_path: Path) -> None:
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    table = datasets.table.pa.table({"text": ["one", "two"]})
    pyarrow.write_table(table, tmp_path / "a.parquet")
    saved = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="made")
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "saved")
    for name in (f"parquet:{tmp_path}/*.parquet", f"datasets:{tmp_path}/saved"):
        found = load_rows(data_job(tmp_path / "unused", pretrained, dataset=name))
        assert found.content.startswith("8 tokens")
    with pytest.raises(JobError, match="cannot be read: "):
        load_rows(data_job(tmp_path / "unused", pretrained, dataset=f"datasets:{tmp_path}/a.parquet"))


RECORD_ERRORS = {
    "unknown fields": ({"txt": "a"}, r"a.jsonl, line 2 has the fields txt, but needs .* --data.arguments text=NAME"),
    "no text": ({"text": 3}, "line 2 has the fields text, but needs texts"),
    "no JSON": ('{"text": ', "line 2 is no JSON object: .* write one record a line"),
    "a list": ([1], "line 2 is no JSON object: .* write one record a line"),
    "no role": ({"messages": [{"content": "a"}]}, "line 2: the chat template refuses it"),
}


@pytest.mark.parametrize("record,message", RECORD_ERRORS.values(), ids=RECORD_ERRORS)
def test_a_wrong_record_is_named_by_file_and_line(record: Any, message: str, pretrained: Path, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", {"text": "one"}, record)
    with pytest.raises(JobError, match=message):
        load_rows(data_job(lines, pretrained))
    assert not list((tmp_path / "cache").glob("*.bin*"))


@pytest.mark.parametrize("template,message", [(None, "has no chat template"), (FORGETFUL, "mark answers in it: ")])
def test_a_template_that_does_not_show_the_answers_is_refused(
    template: str | None, message: str, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "tokenizer", template=template)
    lines = write_lines(tmp_path / "a.jsonl", {"messages": CHAT})
    with pytest.raises(JobError, match=message):
        load_rows(data_job(lines, tmp_path / "tokenizer"))


# ---- jobs ----------------------------------------------------------------------------------------------------------


def test_a_run_resumes_under_another_plan_as_if_never_stopped(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "LlamaRMSNorm", nn.RMSNorm)
    job = tuning_job(tmp_path, pretrained, plan="dp=2 zero=3", pack=True, steps=6)
    whole, _ = run_job(replace(job, train=replace(job.train, save_every=2)))
    again = replace(job.train, output=str(tmp_path / "again"), resume=str(tmp_path / "run/checkpoints/step-2"))
    resumed, _ = run_job(replace(job, train=again, plan=Plan.parse("tp=2")))
    assert resumed.loss == pytest.approx(whole.loss, rel=1e-9)


def write_job(job: Job, path: Path) -> str:
    path.write_text(to_toml(job))
    return str(path)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_an_export_is_read_by_transformers_and_peft_with_its_tokenizer(
    lora: bool, pretrained: Path, tmp_path: Path
) -> None:
    job = tuning_job(tmp_path, pretrained, lora={"r": 2, "target_modules": ["q_proj"]} if lora else None, steps=2)
    run_job(replace(job, train=replace(job.train, dtype="float32")), ranks=1)
    assert main(["checkpoint", "export", str(tmp_path / "run/checkpoints/step-2"), str(tmp_path / "out")]) == 0

    model = transformers.AutoModelForCausalLM.from_pretrained(pretrained if lora else tmp_path / "out")
    trained = load_file(tmp_path / "run" / "parameters.safetensors")
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.PeftModel.from_pretrained(model, tmp_path / "out")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained[name]), name
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == PLAIN
    if not lora:
        assert model.config.use_cache, "the model's own setting"
        given, written = (folder / "generation_config.json" for folder in (pretrained, tmp_path / "out"))
        assert written.read_bytes() == given.read_bytes()


def test_the_example_trains_and_is_verified_and_simulated(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = from_toml(Path(__file__).parents[2] / "examples" / "sft.toml", kind=Job)
    assert job.data.dataset == "json:examples/sft.jsonl"
    lines = Path(__file__).parents[2] / job.data.dataset.removeprefix("json:")
    job = replace(
        job,
        model=ModelJob(name=f"hf:{pretrained}"),
        data=replace(job.data, dataset=f"json:{lines}", cache=str(tmp_path / "cache"), context=64),
        train=replace(job.train, output=str(tmp_path / "run"), steps=1, save_every=0),
    )
    _, said = run_job(job)
    assert "24 records" in said
    assert "validation after step 1" in said
    path = write_job(job, tmp_path / "sft.toml")
    assert main(["verify", path, "--comm=threads", "--steps=1"]) == 0
    assert main(["simulate", path, "--memory"]) == 0
    assert "is the same model as one process" in capsys.readouterr().out


JOB_ERRORS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a missing key": ({"arguments": {"num_layer": 3}}, {}, "model.arguments: 'num_layer' is no key of .*config.json"),
    "other weights": ({"arguments": {"num_hidden_layers": 3}}, {}, "the folder lacks model.layers.2"),
    "other shapes": (
        {"arguments": {"hidden_size": 32}},
        {},
        r"has the shape \(264, 16\) in the folder, and \(264, 32\)",
    ),
    "wrong LoRA": ({"lora": {"rank": 3}}, {}, "lora = .* unexpected keyword argument 'rank'"),
    "no such module": ({"lora": {"r": 3, "target_modules": ["qq"]}}, {}, "Target modules .*qq.* not found"),
    "LoRA of gpt": ({"name": "gpt", "lora": {"r": 3}}, {}, 'model.lora needs model.name = "hf:FOLDER"'),
    "bytes": ({}, {"dataset": None, "tokenizer": None}, 'cannot read bytes; set data.dataset = "json:train.jsonl"'),
    "bytes, packed": ({}, {"dataset": None, "pack": True}, "data.pack and data.tokenizer are for records"),
    "a long context": ({}, {"context": 65}, "exceeds the model's max_position_embeddings = 64; use 64"),
    "an unknown field": ({}, {"arguments": {"txt": "a"}}, "data.arguments: 'txt' is none of text, prompt"),
    "a missing file": ({}, {"dataset": "json:none/*.jsonl"}, "data.dataset: '.*none/.*' is neither a file"),
    "a name": (
        {"name": "hf:no/model"},
        {},
        r"'hf:no/model' is no folder here, and cannot be fetched .* \(OSError: down\)",
    ),
}


@pytest.mark.parametrize("model,data,message", JOB_ERRORS.values(), ids=JOB_ERRORS)
def test_a_wrong_job_is_refused_before_ranks_start(
    model: Any, data: Any, message: str, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: Any, **__: Any) -> str:
        raise OSError("down")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    job = tuning_job(tmp_path, pretrained)
    job = replace(job, model=replace(job.model, **model), data=replace(job.data, **data))
    with pytest.raises(JobError, match=message):
        check_plan(prepare(job, ranks=1))


def test_an_empty_dataset_and_a_missing_library_are_refused(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JobError, match="has no row to train on: 0 records"):
        load_rows(data_job(write_lines(tmp_path / "a.jsonl", ""), pretrained))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(JobError, match=r"data.dataset needs a library: .*; pip install 'meshwise\[datasets\]'"):
        load_rows(data_job(tmp_path / "a.jsonl", pretrained, dataset=f"parquet:{tmp_path}/a.jsonl"))


def test_packed_rows_are_refused_for_a_model_that_attends_across(pretrained: Path, tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=264, hidden_size=16, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    job = tuning_job(tmp_path, tmp_path / "bloom")
    job = replace(job, data=replace(job.data, tokenizer=f"hf:{pretrained}"))
    prepare(job, ranks=1)
    with pytest.raises(JobError, match="BloomForCausalLM lets packed records attend to each other"):
        prepare(replace(job, data=replace(job.data, pack=True)), ranks=1)


def test_packed_rows_of_a_mixture_of_experts_do_not_attend_to_each_other() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    configs = (
        transformers.MixtralConfig(**sizes, **heads, num_local_experts=4),
        transformers.Qwen3MoeConfig(**sizes, **heads, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2),
    )
    tokens, places = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[0, 1, 2, 0, 1]])
    for config in configs:
        model = transformers.AutoModelForCausalLM.from_config(config)
        check_rows_fit(model, largest=5, context=5, packed=True)
        packed = model(tokens, position_ids=places, use_cache=False).logits
        apart = torch.cat([model(each, use_cache=False).logits for each in tokens.split([3, 2], dim=1)], dim=1)
        torch.testing.assert_close(packed, apart)
