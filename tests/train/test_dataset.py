"""The data of a run: bytes of text, datasets, and which rows a rank reads."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from itertools import chain
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from meshwise.base.mesh import even_split
from meshwise.train import data_loading as tokens
from meshwise.train.data_loading import (
    RunData,
    SampleOrder,
    TextDataset,
    length,
    load_data,
    open_tokens,
    read_batches,
    token_file,
)
from meshwise.train.job_settings import DataJob, JobError


def text_job(folder: Path, *names: str, **changes: Any) -> DataJob:
    return DataJob(files=names, cache=str(folder / "cache"), **changes)


def load(folder: Path, *names: str, **changes: Any) -> RunData:
    return load_data(text_job(folder, *names, **changes))


def kept(folder: Path, *names: str) -> bytes:
    return bytes(open_tokens(token_file(names, cache=folder / "cache")))


# ---- tokens --------------------------------------------------------------------------------------------------------


def test_files_folders_and_globs_become_their_bytes_with_a_zero_before_each(tmp_path: Path) -> None:
    for name, text in {"b.txt": "bb", "a.txt": "ä", "deep/c.md": "c", ".hidden/d.txt": "d"}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text, encoding="utf-8")

    a, b, c = b"\0\xc3\xa4", b"\0bb", b"\0c"
    assert kept(tmp_path, f"{tmp_path}/in/b.txt") == b
    assert kept(tmp_path, f"{tmp_path}/in") == a + b + c
    assert kept(tmp_path, f"{tmp_path}/in/*.txt") == a + b
    assert kept(tmp_path, f"{tmp_path}/in/**/*.md", f"{tmp_path}/in/b.txt") == c + b


def test_the_standard_library_is_there_on_every_machine_that_has_python(tmp_path: Path) -> None:
    text = kept(tmp_path, tokens.STDLIB)

    assert len(text) > 2_000_000
    assert b"\0" + Path(os.__file__).read_bytes() + b"\0" in text


def test_tokens_are_kept_until_the_text_changes(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("one")
    first = token_file([str(source)], cache=tmp_path / "cache")
    record = first.stat().st_mtime_ns

    assert token_file([str(source)], cache=tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == record

    source.write_text("three")
    assert kept(tmp_path, str(source)) == b"\0three"


def test_a_full_disk_leaves_no_part_of_a_token_file_and_says_where_to_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_text: object, out: IO[bytes]) -> None:
        out.write(b"part")
        raise OSError(28, "No space left on device")

    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.setattr("meshwise.train.data_loading.shutil.copyfileobj", full)
    message = f"cannot keep the text in {tmp_path}/cache: No space left on device; name a folder .* --data.cache"
    with pytest.raises(JobError, match=message):
        token_file([f"{tmp_path}/a.txt"], cache=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_user_without_a_home_is_asked_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(JobError, match=r"no home folder for the text cache; give --data\.cache"):
        load_data(DataJob(files=(str(tmp_path / "a.txt"),)))


@pytest.mark.parametrize("place", ["a.txt", "a.txt/below", "/proc/1/none"])
def test_a_cache_that_cannot_be_made_says_so(place: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(JobError, match=r"cannot keep the text in .*; name a folder that is writable"):
        token_file([f"{tmp_path}/a.txt"], cache=tmp_path / place)


def test_several_at_once_build_one_whole_token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text " * 1000)
    copied: list[Any] = []

    def copy(source: Any, out: Any) -> None:
        copied.append(source)
        out.write(source.read())

    monkeypatch.setattr(shutil, "copyfileobj", copy)
    start = threading.Barrier(6)
    seen: list[bytes] = []

    def build() -> None:
        start.wait()
        seen.append(kept(tmp_path, f"{tmp_path}/a.txt"))

    threads = [threading.Thread(target=build) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert seen == [b"\0" + b"text " * 1000] * 6
    assert len(copied) == 1
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_file_left_half_written_by_a_killed_run_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("whole")
    path = token_file([f"{tmp_path}/a.txt"], cache=tmp_path / "cache")
    path.rename(path.with_suffix(".partial"))
    path.with_suffix(".partial").write_bytes(b"\0wh")

    assert kept(tmp_path, f"{tmp_path}/a.txt") == b"\0whole"


@pytest.mark.parametrize(
    "names, message",
    [
        (["nowhere.txt"], "'nowhere.txt' is neither a file, a folder with files nor a glob that matches files"),
        (["empty"], "'.*empty' is neither a file, a folder with files nor a glob"),
        (["*.none"], r"none' is neither a file"),
        (["blank.txt"], "all 1 files are empty"),
    ],
)
def test_data_that_is_not_there_is_named(names: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").touch()

    with pytest.raises(JobError, match=message):
        kept(tmp_path, *(name if name == "nowhere.txt" else f"{tmp_path}/{name}" for name in names))


# ---- windows and splits --------------------------------------------------------------------------------------------


def test_a_sample_is_a_window_and_the_same_window_one_token_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 12)))
    data = load(tmp_path, f"{tmp_path}/a.txt", context=3, validation=0.0)

    pairs = [tuple(part.tolist() for part in data.train[index]) for index in range(length(data.train))]

    assert pairs == [([0, 1, 2], [1, 2, 3]), ([3, 4, 5], [4, 5, 6]), ([6, 7, 8], [7, 8, 9])]
    assert data.validation is None
    assert data.text


def test_validation_text_is_the_end_of_the_text_and_no_part_of_the_training_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 100)))
    data = load(tmp_path, f"{tmp_path}/a.txt", context=4, validation=0.2)

    assert data.validation is not None
    train = {int(x) for index in range(length(data.train)) for part in data.train[index] for x in part}
    held_out = {int(x) for index in range(length(data.validation)) for part in data.validation[index] for x in part}
    assert max(train) < 80 <= min(held_out)


@pytest.mark.parametrize(
    "size, validation, enough", [(5, 0.0, True), (4, 0.0, False), (10, 0.1, True), (9, 0.1, False)]
)
def test_text_has_to_fill_a_sample_of_each_kind(size: int, validation: float, enough: bool, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * (size - 1))

    if enough:
        load(tmp_path, f"{tmp_path}/a.txt", context=4, validation=validation)
    else:
        with pytest.raises(JobError, match=rf"hold {size} bytes, but a sample takes data.context \+ 1 = 5"):
            load(tmp_path, f"{tmp_path}/a.txt", context=4, validation=validation)


def test_a_worker_maps_the_text_itself(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 1_000_000)
    data = load(tmp_path, f"{tmp_path}/a.txt", context=4)

    copy = pickle.dumps(data.train)

    assert len(copy) < 1000
    assert isinstance(data.train, TextDataset)
    assert torch.equal(pickle.loads(copy)[7][0], data.train[7][0])


# ---- datasets of the user's own ------------------------------------------------------------------------------------

DATASETS = """
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

class Squares(Dataset):
    def __init__(self, size=20):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        return {"x": torch.tensor([float(index)]), "y": torch.tensor([float(index**2)])}

def both(size):
    return Squares(size), Squares(3)

class Stream(IterableDataset):
    def __iter__(self):
        return iter([1])

class Endless(Dataset):
    def __getitem__(self, index):
        return index

def nothing():
    return Squares(0)
"""


def own(folder: Path, name: str, **changes: Any) -> RunData:
    path = folder / "own_datasets.py"
    path.write_text(DATASETS)
    return load_data(DataJob(dataset=f"{path}:{name}", **changes))


@pytest.fixture(autouse=True)
def _forget_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "own_datasets", raising=False)


def numbers(dataset: Dataset[Any]) -> list[int]:
    return [int(dataset[index]["x"]) for index in range(length(dataset))]


def test_validation_samples_are_drawn_from_a_dataset(tmp_path: Path) -> None:
    data = own(tmp_path, "Squares", validation=0.25, arguments={"size": 20})

    assert data.validation is not None
    assert len(numbers(data.validation)) == 5
    assert sorted(numbers(data.train) + numbers(data.validation)) == list(range(20))
    assert numbers(data.validation) != list(range(15, 20))
    assert not data.text


def test_a_dataset_function_may_bring_its_own_validation_data(tmp_path: Path) -> None:
    data = own(tmp_path, "both", arguments={"size": 7})

    assert data.validation is not None
    assert (numbers(data.train), numbers(data.validation)) == (list(range(7)), [0, 1, 2])


@pytest.mark.parametrize(
    "name, message",
    [
        ("Stream", "returned a Stream; .* A stream alone needs data.validation=0"),
        ("Endless", "returned a Endless without a length"),
        ("nothing", "holds 0 samples"),
        ("Squars", "no function 'Squars' in .*; did you mean 'Squares'?"),
    ],
)
def test_a_dataset_that_cannot_be_trained_on_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=message):
        own(tmp_path, name)


def test_an_argument_that_the_dataset_does_not_take_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"data.arguments: unknown argument 'siz'; did you mean 'size'"):
        own(tmp_path, "Squares", arguments={"siz": 4})


# ---- reading -------------------------------------------------------------------------------------------------------


def rows_of(dataset: Dataset[Any], numbers: range, *, ranks: int, **how: Any) -> list[list[list[int]]]:
    """The samples that each rank reads, batch by batch."""

    def of(rank: int) -> list[list[int]]:
        batches = read_batches(dataset, numbers=numbers, share=lambda size: even_split(size, ranks)[rank], **how)
        return [[int(x) for x in batch[0]] for batch in batches]

    return [of(rank) for rank in range(ranks)]


def test_each_rank_reads_its_rows_of_the_same_global_batches() -> None:
    dataset = TensorDataset(torch.arange(10))

    assert rows_of(dataset, range(0, 10, 4), ranks=1) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]
    assert rows_of(dataset, range(0, 10, 4), ranks=3) == [
        [[0, 1], [4, 5], [8]],
        [[2], [6], [9]],
        [[3], [7], []],
    ]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")  # where there is one core
@pytest.mark.parametrize("ranks, workers", [(1, 0), (2, 0), (3, 0), (5, 0), (1, 2)])
def test_batches_run_over_the_end_of_an_epoch(ranks: int, workers: int) -> None:
    dataset, order = TensorDataset(torch.arange(7)), SampleOrder(7, seed=4)

    per_rank = rows_of(dataset, range(0, 15, 5), ranks=ranks, order=order, workers=workers)

    together = [list(chain.from_iterable(parts)) for parts in zip(*per_rank, strict=True)]
    assert [len(batch) for batch in together] == [5, 5, 5]
    assert list(chain.from_iterable(together)) == order.indices(0, stop=15)


def test_reading_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    list(read_batches(TensorDataset(torch.arange(4)), numbers=range(0, 4, 2), share=lambda size: (0, size)))

    assert torch.equal(torch.get_rng_state(), before)
