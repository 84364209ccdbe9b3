"""Test streams, collators and buckets of length: the same global batches under every plan, resumed at the sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from meshwise.plan import Plan
from meshwise.train.data_loading import SampleOrder, load_data, read_batches
from meshwise.train.job_settings import DataJob, Job, JobError, ModelJob, OptimizerJob, ScheduleJob, TrainJob
from meshwise.train.prepare_job import prepare
from meshwise.train.streams_and_collators import SampleStream, pack, pad
from run_job import run_job

HERE = Path(__file__)
SIZE = 23


def sample(number: int) -> tuple[Tensor, Tensor]:
    """A text of 3 to 9 tokens, and its next tokens."""
    text = torch.randint(16, (4 + number * 5 % 7,), generator=torch.Generator().manual_seed(number))
    return text[:-1], text[1:]


class Counted(IterableDataset[Any]):
    """A stream without a state, in another order in each epoch."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return (sample((number * 7 + self.epoch) % self.size) for number in range(self.size))


class Stateful(Counted):
    """The same stream, which continues from its state and never yields a sample that was trained on."""

    at, start = 0, 0

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for at in range(start, self.size):
            self.at = at + 1
            yield sample(((self.at - 1) * 7 + self.epoch) % self.size)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.at = state["at"]


def listed() -> list[Any]:
    return [sample(number) for number in range(SIZE)]


def tokens() -> list[dict[str, Any]]:
    return [{"input_ids": [*x.tolist(), int(y[-1])], "text": "left out"} for x, y in listed()]


def masked(samples: list[Any], *, rate: float) -> Any:
    """Pad, and replace random tokens: the batch depends on torch's generator."""
    inputs, targets = pad(samples)
    return torch.where(torch.rand(inputs.shape) < rate, 0, inputs), targets


def job(folder: Path, name: str, *, plan: str = "dp=1", bucket: int = 0, **data: Any) -> Job:
    shape = {"layers": 2, "heads": 2, "width": 8, "vocabulary": 16, "context": 16, "dropout": 0.2}
    return Job(
        plan=Plan.parse(plan),
        model=ModelJob("gpt", shape),
        data=DataJob(dataset=f"{HERE}:{name}", validation=0, context=16, bucket_by_length=bucket, **data),
        optimizer=OptimizerJob("Adam", lr=1e-2),
        schedule=ScheduleJob("constant"),
        train=TrainJob(steps=9, batch=5, output=str(folder / "run"), dtype="float64", save_every=1, keep_last=9),
    )


KINDS: dict[str, dict[str, Any]] = {
    "counted": {"name": "Counted", "collator": "pad"},
    "stateful, sorted": {"name": "Stateful", "collator": "pad", "bucket": 2},
    "listed, sorted": {"name": "listed", "collator": "pad", "bucket": 3},
    "random": {"name": "listed", "collator": f"{HERE}:masked", "collator_arguments": {"rate": 0.3}},
}


def losses(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


RESUMES = {"dp=2 zero=3": 4, "tp=2": 5, "pp=2 microbatches=2": 7}


@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_trains_on_the_same_batches_and_resumes_at_the_sample(kind: str, tmp_path: Path) -> None:
    run_job(job(tmp_path, **KINDS[kind]), ranks=1)
    expected = losses(tmp_path / "run")
    plans = RESUMES if kind == "stateful, sorted" else ("dp=2 zero=3",)
    for plan, step in ((plan, RESUMES[plan]) for plan in plans):
        other = job(tmp_path, plan=plan, **KINDS[kind])
        place = tmp_path / plan
        settings = replace(other.train, output=str(place), resume=str(tmp_path / f"run/checkpoints/step-{step}"))
        run_job(replace(other, train=settings))
        assert losses(place) == pytest.approx(expected[step:], rel=1e-9), plan


def read(source: Any, numbers: range, *, window: int = 1, seed: int = 3) -> list[Any]:
    order = InOrder(1, seed)
    return list(read_batches(source, numbers=numbers, share=lambda _: (0, 0), order=order, collate=list, window=window))


class InOrder(SampleOrder):
    def indices(self, start: int, *, stop: int) -> list[int]:
        return list(range(start, stop))


class Numbers(Stateful):
    """Sample k of epoch e is e·100 + k; `read_samples` has what was read."""

    read_samples: list[int]

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for at in range(start, self.size):
            self.at = at + 1
            self.read_samples.append(self.epoch * 100 + self.at - 1)
            yield self.read_samples[-1]


class Uncounted(Counted):
    def __iter__(self) -> Iterator[Any]:
        return (self.epoch * 100 + number for number in range(self.size))


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("kind", [Numbers, Uncounted])
def test_a_stream_runs_over_the_end_of_an_epoch_and_continues_anywhere(kind: Any, window: int) -> None:
    Numbers.read_samples = []
    whole = read(SampleStream(kind(7), saved={}), range(0, 18, 3), window=window)
    assert sorted(chain.from_iterable(whole)) == [*range(7), *range(100, 107), *range(200, 204)]
    for done in range(1, 6):
        stream = SampleStream(kind(7), saved={})
        read(stream, range(0, 3 * done, 3), window=window)
        saved = json.loads(json.dumps(stream.state(3 * done)))
        Numbers.read_samples = []
        assert read(SampleStream(kind(7), saved=saved), range(3 * done, 18, 3), window=window) == whole[done:]
        again = 3 * done % (3 * window)
        assert kind is Uncounted or len(Numbers.read_samples) == 18 - 3 * done + again, "nothing is skipped by reading"


def test_batches_are_sorted_within_a_window_and_shuffled_by_the_seed() -> None:
    texts = [list(range(length)) for length in (5, 1, 4, 2, 6, 3, 9, 7, 8, 1, 1, 1)]
    batches = read(texts, range(0, 12, 2), window=3)
    lengths = [[len(text) for text in batch] for batch in batches]
    assert sorted(lengths[:3]) == [[1, 2], [3, 4], [5, 6]]
    assert sorted(lengths[3:]) == [[1, 1], [1, 7], [8, 9]]
    assert read(texts, range(8, 12, 2), window=3) == batches[4:], "a run that begins inside a window"
    orders = {str(read(texts, range(0, 6, 2), window=3, seed=seed)) for seed in range(9)}
    assert len(orders) > 2
    assert [len(batch) for batch in read(texts, range(0, 5, 2))] == [2, 2, 1]
    assert read(texts, range(0, 8, 2), window=3) == batches[:4], "a run that ends inside a window"


def test_samples_are_padded_and_packed() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "x": 1.5, "text": "a"},
        {"input_ids": [4], "labels": [4], "x": 2},
    ]
    padded = {key: value.tolist() for key, value in pad(samples, multiple=4).items()}
    assert padded == {
        "input_ids": [[1, 2, 3, 0], [4, 0, 0, 0]],
        "labels": [[-100, 2, 3, -100], [4, -100, -100, -100]],
        "x": [1.5, 2.0],
        "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0]],
    }
    assert pad([torch.ones(1, 2), torch.ones(2, 2)]).tolist() == [[[1, 1], [0, 0]], [[1, 1], [1, 1]]]
    packed = pack([*samples, {"input_ids": [5, 6, 7, 8, 9, 9]}, {"input_ids": [3], "targets": [8]}], context=5)
    assert {key: value.tolist() for key, value in packed.items()} == {
        "input_ids": [[1, 2, 3, 4, 0], [5, 6, 7, 8, 9], [3, 0, 0, 0, 0]],
        "targets": [[2, 3, -100, -100, -100], [6, 7, 8, 9, 9], [8, -100, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4], [0, 0, 1, 2, 3]],
    }


@pytest.mark.filterwarnings("ignore")  # of dill
def test_streams_of_the_library_datasets_and_of_torchdata_continue() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.table.InMemoryTable(datasets.table.pa.table({"x": list(range(20))}))
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    rows = [{"x": number} for number in range(20)]
    loaders: list[Any] = [
        lambda: datasets.Dataset(table, fingerprint="made").to_iterable_dataset(num_shards=4),
        lambda: datasets.Dataset(table, fingerprint="made").to_iterable_dataset().shuffle(seed=0, buffer_size=6),
        lambda: torchdata.StatefulDataLoader(rows, batch_size=None),
    ]
    for make in loaders:
        whole = read(SampleStream(make(), saved={}), range(0, 48, 3))
        assert len({row["x"] for batch in whole[:6] for row in batch}) == 18
        for done in (1, 4, 7, 11):
            stream = SampleStream(make(), saved={})
            read(stream, range(0, 3 * done, 3))
            saved = json.loads(json.dumps(stream.state(3 * done)))
            assert read(SampleStream(make(), saved=saved), range(3 * done, 48, 3)) == whole[done:]


@pytest.mark.parametrize(
    "name, changes, message",
    [
        (
            "Counted",
            {"validation": 0.1},
            "returned a Counted; .* A stream alone needs data.validation=0",
        ),
        ("once", {}, "returned a generator; return a list, a torch Dataset"),
        ("loader", {}, "returned a DataLoader; return .* loader with batch_size=None"),
        ("listed", {"collator": "pads"}, "data.collator = 'pads' is none of pad, pack, hf:CLASS and module:function"),
        ("listed", {"collator": "hf:No"}, "data.collator = 'hf:No': transformers has no 'No'; there are DataCollator"),
        ("listed", {"collator": "hf:DataCollatorWithPading"}, "did you mean 'DataCollatorWithPadding'"),
        ("listed", {"collator": "hf:DataCollatorWithPadding"}, 'add data.tokenizer = "hf:FOLDER"'),
        (
            "listed",
            {"collator": "pad", "collator_arguments": {"multipl": 3}},
            "unknown argument 'multipl'; did you mean",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_data(DataJob(dataset=f"{HERE}:{name}", **{"validation": 0, **changes}))


def once() -> Iterator[Any]:
    yield sample(0)


def loader() -> Any:
    return torch.utils.data.DataLoader(Counted(), batch_size=2)


def test_keys_without_a_collator_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r'need a collator; add data.collator = "pad"'):
        DataJob(dataset="a:b", bucket_by_length=3)
    with pytest.raises(JobError, match=r"data.collator = 'pad' needs data.dataset"):
        DataJob(collator="pad")
    with pytest.raises(JobError, match=r"data.collator = 'pack' needs data.dataset; for records it is .pad."):
        DataJob(dataset="json:a", collator="pack")
    with pytest.raises(JobError, match=r"data.dataset yields no samples"):
        SampleStream(Counted(0), saved={}).take(3, stop=3)
    growing = job(tmp_path, "listed", bucket=2, collator="pad")
    growing = replace(growing, train=replace(growing.train, ramp=(3, 2, 10)))
    with pytest.raises(JobError, match=r"data.bucket_by_length needs batches of one size; leave out train.ramp"):
        prepare(growing, ranks=1)
