"""Load the training and validation data of a run (`load_data`), and yield this rank's rows of each global batch.

docs/data.md shows which samples a rank reads. Samples are numbered by a count over the run, so a sampler has no state.
`SampleOrder` maps a number to a sample by a permutation of each epoch. This is a keyed Feistel network on two digits in
base ⌈√size⌉ (Black and Rogaway, *Ciphers with Arbitrary Finite Domains*, 2002). It is applied again until the result is
below `size`. Its round function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).

`token_file` joins texts into one file of bytes in a cache folder; `open_tokens` maps it into memory, which the ranks of
a machine share. A zero byte precedes every text file, so that a model learns where a text begins."""

import contextlib
import fcntl
import functools
import glob
import hashlib
import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from meshwise.base.atomic_file import write_whole
from meshwise.base.tensor_tree import take_rows
from meshwise.comm.api.streams import gpu_count
from meshwise.model.forward import Forward
from meshwise.train.console_output import counted
from meshwise.train.job_settings import DataJob, JobError
from meshwise.train.objects_by_name import bind, locate
from meshwise.train.streams_and_collators import (
    Batches,
    Collate,
    SampleStream,
    is_stream,
    named_collator,
    without_targets,
)

STDLIB = "python-stdlib"
"""Name in `data.files` for the source text of Python's standard library."""
START_TOKEN = 0
"""The token before every text file."""
_BLOCKS = 256
_BLOCK = 4096
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def token_file(names: Sequence[str], *, cache: Path) -> Path:
    """Return the path of the token file of these texts in the folder `cache`; build the file if it is missing.

    names: text files, folders (with all files in them that are not hidden), globs, or `python-stdlib`. Raises JobError
    for a name without files, an unreadable file, empty texts, or a cache that cannot be written."""
    with cache_errors(cache):
        files = [path for name in names for path in text_files(name, key="data.files")]
        stats = [(path, path.stat()) for path in files]
        if not any(stat.st_size for _, stat in stats):
            raise JobError(f"data.files = {list(names)}: all {len(files)} files are empty")
        inputs = "\n".join(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)
        target = cache / f"bytes-{hashlib.sha256(inputs.encode()).hexdigest()[:32]}.bin"
        return build_once(target, write=functools.partial(_join, files))


@contextlib.contextmanager
def cache_errors(cache: Path) -> Iterator[None]:
    """Turn an OSError inside into a JobError, about the folder `cache` or about the data that are read."""
    try:
        yield
    except OSError as error:
        at = Path(error.filename or cache)
        if at.is_relative_to(cache) or cache.is_relative_to(at):
            hint = "name a folder that is writable and has room, as in --data.cache /tmp/meshwise-data"
            raise JobError(f"data: cannot keep the text in {cache}: {error.strerror}; {hint}") from error
        raise JobError(f"data: cannot read the text: {error.strerror}: {at}") from error


def open_tokens(path: Path) -> NDArray[np.uint8]:
    """Return the tokens of a token file as a read-only memory map."""
    return np.memmap(path, dtype=np.uint8, mode="r")


def digest(tokens: NDArray[np.uint8]) -> str:
    """Return a hash of 256 evenly spaced blocks of 4 KiB, which takes milliseconds for any number of tokens."""
    content = hashlib.sha256()
    for start in np.linspace(0, max(0, len(tokens) - _BLOCK), num=_BLOCKS, dtype=np.int64):
        content.update(tokens[start : start + _BLOCK].tobytes())
    return content.hexdigest()[:16]


def cache_folder(job: DataJob) -> Path:
    """Return `cache` of a job, by default in $XDG_CACHE_HOME or ~/.cache. Raises JobError without a home folder."""
    if job.cache is not None:
        return Path(job.cache)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwise"
    except RuntimeError as error:  # a user without an entry in passwd, as in a container
        raise JobError("no home folder for the text cache; give --data.cache /tmp/meshwise-data") from error


def build_once(target: Path, *, write: Callable[[Path], None]) -> Path:
    """Return the path of a cached file; `write` it if it is missing, unless another process does so meanwhile."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            write_whole(target, write=write, aside=target.with_suffix(".partial"))
    return target


def _join(files: Sequence[Path], into: Path) -> None:
    with into.open("wb") as out:
        for path in files:
            out.write(bytes([START_TOKEN]))
            with path.open("rb") as text:
                shutil.copyfileobj(text, out)


def text_files(name: str, *, key: str) -> Iterator[Path]:
    """Yield the files that a name in the job's `key` means, sorted. Raises JobError when there are none."""
    if name == STDLIB:
        folder = Path(sysconfig.get_path("stdlib"))
        found = [path for path in folder.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(folder).parts)]
    elif Path(name).is_dir():
        files = [path for path in Path(name).rglob("*") if path.is_file()]
        found = [path for path in files if not any(part.startswith(".") for part in path.relative_to(name).parts)]
    elif Path(name).exists():
        found = [Path(name)]
    else:
        matches = glob.glob(name, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        found = [path for path in map(Path, matches) if path.is_file()]
    if not found:
        raise JobError(f"{key}: {name!r} is neither a file, a folder with files nor a glob that matches files")
    yield from sorted(found)


UInt64Array = NDArray[np.uint64]


@dataclass(frozen=True)
class SampleOrder:
    """The order in which a run reads a dataset of `size` samples; `seed` shuffles it anew in every epoch."""

    size: int
    seed: int

    def indices(self, start: int, *, stop: int) -> list[int]:
        """Return the index in the dataset (0 … size-1) of each sample with a global number from `start` to `stop`-1."""
        numbers = np.arange(start, stop, dtype=np.uint64)
        size = np.uint64(self.size)
        epoch = numbers // size
        key = _mix(_mix(np.full_like(epoch, self.seed & (1 << 64) - 1)) ^ epoch)
        return [int(index) for index in _permute(numbers % size, self.size, key)]


def _permute(index: UInt64Array, size: int, key: UInt64Array) -> UInt64Array:
    """Apply to each index (0 … size-1) the permutation that its `key` selects; both arrays have one length."""
    base = np.uint64(math.isqrt(size - 1) + 1)
    result = index
    outside = np.ones(index.shape, dtype=np.bool_)
    while outside.any():
        left, right = result // base, result % base
        for number in range(8):
            left, right = right, (left + _mix(right ^ _mix(key + np.uint64(number)))) % base
        result = np.where(outside, left * base + right, result)
        outside = result >= np.uint64(size)
    return result


def _mix(x: UInt64Array) -> UInt64Array:
    """Return a hash of 64-bit integers: a bijection in which each input bit changes about half of the output bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class RunData:
    """The datasets of a run.

    | train        map-style dataset to train on, or a stream of samples
    | validation   map-style dataset for the validation; None without one
    | summary      one line about the data, for the user
    | text         True if the samples are `TextDataset`'s pairs of byte windows
    | content      text that a resumed run compares: size and digest of a text, or a dataset's number of samples
    | forward      function of a model and a batch that calls the model; None: `default_forward`
    | largest      largest token of rows of tokens; None for other data
    | collate, window   collator of whole global batches, as in `read_batches`, and how many are sorted by length"""

    train: Any
    validation: Any
    summary: str
    text: bool
    content: str
    forward: Forward | None = None
    largest: int | None = None
    collate: Collate | None = None
    window: int = 1


class TextDataset(Dataset[tuple[Tensor, Tensor]]):
    """Pairs (input, target) of windows of a token file, each an int64 tensor `(context,)`. In sample i, the input
    begins at token i·context, counted from `start`, and the target one token later. The data end before `stop`."""

    def __init__(self, path: Path, *, start: int, stop: int, context: int) -> None:
        self._made = functools.partial(TextDataset, path, start=start, stop=stop, context=context)
        self._tokens = open_tokens(path)[start:stop]
        self._context = context

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._context
        window = torch.from_numpy(self._tokens[start : start + self._context + 1].astype(np.int64))
        return window[:-1], window[1:]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the arguments, so that a worker process maps the file again; a pickled map would be a copy."""
        return self._made, ()


@dataclass(frozen=True)
class DatasetPart(Dataset[Any]):
    """Part of a shuffled dataset: the samples with numbers `start` … `stop`-1 in `order`. It stores no indices."""

    dataset: Dataset[Any]
    order: SampleOrder
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Any:
        number = self.start + index
        return self.dataset[self.order.indices(number, stop=number + 1)[0]]


def load_data(job: DataJob, *, made: Dataset[Any] | None = None) -> RunData:
    """Return the datasets of a job. Writes text into the cache, as a token file. Raises JobError for too few data.

    `made`: the dataset of the job, if it has been loaded already."""
    if made is None and (job.pack or (job.tokenizer and not job.collator)):
        raise JobError(
            f"data.dataset = {job.dataset!r} names no records, and data.pack and data.tokenizer are for records; write "
            'data.dataset = "json:train.jsonl", or leave them out'
        )
    return _load_text(job) if job.dataset is None else _load_dataset(job, made)


def length(dataset: Any) -> int:
    """Return the number of samples of a dataset, sys.maxsize for a stream. Raises JobError for one without a length."""
    try:
        return sys.maxsize if is_stream(dataset) else len(dataset)
    except TypeError as error:
        raise JobError(f"data.dataset returned a {type(dataset).__name__} without a length; add __len__") from error


def read_batches(
    source: Any,
    *,
    numbers: range,
    share: Callable[[int], tuple[int, int]],
    order: SampleOrder | None = None,
    workers: int = 0,
    collate: Collate | None = None,
    window: int = 1,
) -> Iterator[Any]:
    """Yield this rank's rows of each global batch, or with `collate` all rows. A rank without rows gets 0 rows.

    | source, order, window   as in `Batches`
    | numbers     global numbers to read; its step is the batch size: `range(0, 10, 4)` is batches of 4, 4 and 2 samples
    | share       from the size of a global batch, its rows [start, stop) that this rank reads, as `Trainer.share` does
    | workers     processes that read ahead; 0: this process reads, as it does for a stream
    | collate     collator of whole global batches: all rows are yielded"""
    size = numbers.step * window

    def ranges() -> Iterator[range]:
        for start in range(numbers.start - numbers.start % size * (window > 1), numbers.stop, size):
            rows = size if window > 1 else min(size, numbers.stop - start)
            begin, end = (0, rows) if collate else share(rows)
            yield range(start + begin, start + end, numbers.step)

    loader: DataLoader[Any] = DataLoader(
        Batches(source, order, collate or default_collate, window),
        batch_size=None,
        # A rank without rows reads one sample, which gives its batch of 0 rows the right shapes.
        sampler=(wanted or range(numbers.start, numbers.start + 1) for wanted in ranges()),
        num_workers=0 if isinstance(source, SampleStream) else workers,
        pin_memory=gpu_count() > 0,
        generator=torch.Generator(),
    )
    for wanted, batches in zip(ranges(), loader, strict=True):
        for number, batch in zip(wanted or [numbers.start], batches, strict=True):
            if numbers.start <= number < numbers.stop:
                yield batch if wanted else take_rows(batch, start=0, stop=0)


def _load_text(job: DataJob) -> RunData:
    path = token_file(job.files, cache=cache_folder(job))
    size = path.stat().st_size
    sample = job.context + 1
    validation_size = max(sample, int(size * job.validation)) if job.validation else 0
    if size - validation_size < sample:
        parts = "one for training and one for validation" if job.validation else "one"
        raise JobError(
            f"data.files hold {size} bytes, but a sample takes data.context + 1 = {sample} bytes and the run needs at "
            f"least {parts}; use more text, a smaller data.context{' or data.validation = 0' * bool(job.validation)}"
        )
    train = TextDataset(path, start=0, stop=size - validation_size, context=job.context)
    held_out = TextDataset(path, start=size - validation_size, stop=size, context=job.context)
    validation = held_out if validation_size else None
    summary = f"{size / 1e6:,.2f} MB of text ({', '.join(job.files)}): {_counts(train, validation)}"
    content = f"{size} bytes, {digest(open_tokens(path))}"
    return RunData(train, validation, f"{summary} of {counted(job.context, of='byte')}", text=True, content=content)


def _load_dataset(job: DataJob, made: Dataset[Any] | None) -> RunData:
    assert job.dataset is not None
    made = made or bind(locate(job.dataset, key="data.dataset"), arguments=job.arguments, key="data.arguments")()
    train, validation = made if isinstance(made, tuple) else (made, None)
    validation = list(validation) if is_stream(validation) else validation
    for part in (train, *([] if validation is None else [validation])):
        usable = not isinstance(part, Iterator) and (is_stream(part) or getattr(part, "__getitem__", None))
        divisible = not is_stream(part) or validation is not None or not job.validation
        if not usable or getattr(part, "batch_size", None) or not divisible:
            raise JobError(
                f"data.dataset = {job.dataset!r} returned a {type(part).__name__}; return a list, a torch Dataset, a "
                "loader with batch_size=None, or a pair (training, validation). A stream alone needs data.validation=0"
            )
    size = length(train)
    if validation is None and job.validation:
        validation_size = max(1, round(size * job.validation))
        order = SampleOrder(size, seed=0)
        whole, train = train, DatasetPart(train, order=order, start=0, stop=max(0, size - validation_size))
        validation = DatasetPart(whole, order=order, start=size - validation_size, stop=size)
    if length(train) < 1 or (validation is not None and length(validation) < 1):
        samples = counted(size, of="sample")
        raise JobError(f"data.dataset = {job.dataset!r} holds {samples}; training and validation need one or more each")
    window = max(1, job.bucket_by_length)
    counts = f"a {type(train).__name__}" if is_stream(train) else _counts(train, validation)
    collate = named_collator(job) or (default_collate if is_stream(train) else None)
    forward, summary = without_targets if job.collator else None, f"{job.dataset}: {counts}"
    return RunData(
        train, validation, summary, text=False, content=counts, forward=forward, collate=collate, window=window
    )


def _counts(train: Dataset[Any], validation: Dataset[Any] | None) -> str:
    kept = f" and {length(validation):,} for validation" if validation is not None else ""
    return f"{counted(length(train), of='sample')}{kept}"
