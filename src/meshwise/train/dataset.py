"""Load the training and validation data of a run (`load_data`), and yield this rank's rows of each global batch.

`read_batches` yields the rows. Here two ranks read global batches of B = 8 samples; `SampleOrder` maps each global
number to a sample of the dataset:

    global number     0 … 7           8 … 15         …
    global batch      └─ step 0 ─┘    └─ step 1 ─┘
    rank 0 reads      0 … 3           8 … 11
    rank 1 reads      4 … 7           12 … 15

torch's DataLoader reads, pins and collates. Global numbers follow from a count of samples, so a sampler has no state.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from meshwise.base.tensor_tree import take_rows
from meshwise.comm.api.streams import gpu_count
from meshwise.train.console_output import counted
from meshwise.train.job import ROW_KINDS, DataJob, JobError
from meshwise.train.objects_by_name import bind, locate
from meshwise.train.sample_order import SampleOrder
from meshwise.train.token_file import default_cache, digest, open_tokens, token_file
from meshwise.train.tuning_rows import TuningRows, tuning_rows

ShareFunction: TypeAlias = Callable[[int], tuple[int, int]]
"""Function from the size of a global batch to its rows [start, stop) that this rank reads, such as `Trainer.share`."""


@dataclass(frozen=True)
class RunData:
    """The datasets of a run.

    | train        map-style dataset to train on
    | validation   map-style dataset for the validation; None without one
    | summary      one line about the data, for the user
    | text         True if the samples are `TextDataset`'s pairs of byte windows
    | rows         the rows of tokens from which the samples are taken; None for other data
    | content      text that a resumed run compares: size and digest of a text, or a dataset's number of samples"""

    train: Dataset[Any]
    validation: Dataset[Any] | None
    summary: str
    text: bool
    content: str
    rows: TuningRows | None = None


class TextDataset(Dataset[tuple[Tensor, Tensor]]):
    """Pairs (input, target) of windows of a token file, each an int64 tensor `(context,)`. In sample i, the input
    begins at token i·context, counted from token `start`, and the target one token later. Token `stop` ends the data.
    """

    def __init__(self, path: Path, *, start: int, stop: int, context: int) -> None:
        self._arguments = (path, start, stop, context)
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
        path, start, stop, context = self._arguments
        return partial(TextDataset, path, start=start, stop=stop, context=context), ()


class DatasetPart(Dataset[Any]):
    """Part of a shuffled dataset: the samples with numbers `start` … `stop`-1 in `order`. It stores no indices."""

    def __init__(self, dataset: Dataset[Any], *, order: SampleOrder, start: int, stop: int) -> None:
        self._dataset = dataset
        self._order = order
        self._start = start
        self._size = stop - start

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        number = self._start + index
        return self._dataset[self._order.indices(number, stop=number + 1)[0]]


def load_data(job: DataJob) -> RunData:
    """Return the datasets of a job. Writes text into the cache, as a token file. Raises JobError for too few data."""
    if (job.pack or job.tokenizer) and not (job.dataset or "").startswith(ROW_KINDS):
        raise JobError(
            'data.pack and data.tokenizer are for records; add data.dataset = "json:FILES", or leave them out'
        )
    return _load_text(job) if job.dataset is None else _load_dataset(job)


def length(dataset: Dataset[Any]) -> int:
    """Return the number of samples of a map-style dataset. Raises JobError for a dataset without a length."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise JobError(
            f"data.dataset returned a {type(dataset).__name__} without a length; a map-style Dataset needs __len__ and "
            "__getitem__"
        ) from error


def read_batches(
    dataset: Dataset[Any], *, numbers: range, share: ShareFunction, order: SampleOrder | None = None, workers: int = 0
) -> Iterator[Any]:
    """Yield this rank's rows of each global batch, collated by torch. A rank without rows gets a batch of 0 rows.

    | numbers     global numbers to read; its step is the batch size: `range(0, 10, 4)` is batches of 4, 4 and 2 samples
    | share       the rows of a global batch that this rank reads
    | order       maps a global number to a sample; None: sample i has the number i
    | workers     processes that read ahead; 0: this process reads"""
    rows = _Rows(numbers, share, order)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=rows,
        num_workers=workers,
        pin_memory=gpu_count() > 0,
        generator=torch.Generator(),
    )
    for (start, stop), batch in zip(rows.bounds(), loader, strict=True):
        yield batch if start < stop else take_rows(batch, start=0, stop=0)


@dataclass(frozen=True)
class _Rows:
    """Batch sampler of this rank's samples. For a batch without rows it yields one sample, for its shape."""

    numbers: range
    share: ShareFunction
    order: SampleOrder | None

    def bounds(self) -> Iterator[tuple[int, int]]:
        for first in self.numbers:
            size = min(self.numbers.step, self.numbers.stop - first)
            start, stop = self.share(size)
            yield first + start, first + stop

    def __iter__(self) -> Iterator[list[int]]:
        for start, stop in self.bounds():
            wanted = range(start, stop) if start < stop else range(self.numbers.start, self.numbers.start + 1)
            yield list(wanted) if self.order is None else self.order.indices(wanted.start, stop=wanted.stop)

    def __len__(self) -> int:
        return len(self.numbers)


def _load_text(job: DataJob) -> RunData:
    path = token_file(job.files, cache=default_cache() if job.cache is None else Path(job.cache))
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
    validation = (
        TextDataset(path, start=size - validation_size, stop=size, context=job.context) if validation_size else None
    )
    summary = f"{size / 1e6:,.2f} MB of text ({', '.join(job.files)}): {_counts(train, validation)}"
    content = f"{size} bytes, {digest(open_tokens(path))}"
    return RunData(train, validation, f"{summary} of {counted(job.context, of='byte')}", text=True, content=content)


def _load_dataset(job: DataJob) -> RunData:
    assert job.dataset is not None
    rows = tuning_rows(job) if job.dataset.startswith(ROW_KINDS) else None
    made = rows or bind(locate(job.dataset, key="data.dataset"), arguments=job.arguments, key="data.arguments")()
    train, validation = made if isinstance(made, tuple) else (made, None)
    for part in (train, *([] if validation is None else [validation])):
        if not isinstance(part, Dataset) or isinstance(part, IterableDataset):
            raise JobError(
                f"data.dataset = {job.dataset!r} returned a {type(part).__name__}; return a map-style "
                "torch.utils.data.Dataset, or a pair of them (training, validation)"
            )
    size = length(train)
    if validation is None and job.validation:
        validation_size = max(1, round(size * job.validation))
        order = SampleOrder(max(1, size), seed=0)
        whole, train = train, DatasetPart(train, order=order, start=0, stop=max(0, size - validation_size))
        validation = DatasetPart(whole, order=order, start=size - validation_size, stop=size)
    if length(train) < 1 or (validation is not None and length(validation) < 1):
        raise JobError(
            f"data.dataset = {job.dataset!r} holds {counted(size, of='sample')}; training and validation need at least "
            "one each"
        )
    counts = _counts(train, validation)
    if rows is not None:
        summary = f"{job.dataset}: {rows.summary}: {counts} of {counted(job.context, of='token')}"
        return RunData(train, validation, summary, text=False, content=rows.content, rows=rows)
    return RunData(train, validation, f"{job.dataset}: {counts}", text=False, content=counts)


def _counts(train: Dataset[Any], validation: Dataset[Any] | None) -> str:
    kept = f" and {length(validation):,} for validation" if validation is not None else ""
    return f"{counted(length(train), of='sample')}{kept}"
