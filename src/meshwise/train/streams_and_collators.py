"""Read samples of iterable datasets so that a run can resume (`SampleStream`), and collate them: `pad`, `pack`, others.

docs/data.md lists the collators. `Batches` reads a map-style dataset by ranges of numbers. `data.bucket_by_length`
sorts the samples of some batches, a window, by length. A run that resumes inside a window reads it again."""

import contextlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from meshwise.base.tensor_tree import reachable
from meshwise.model.forward import default_forward
from meshwise.reference.gpt import IGNORED
from meshwise.train.job_settings import HUB, DataJob, JobError
from meshwise.train.objects_by_name import bind, locate, name_hint
from meshwise.train.pretrained_model import hub_folder, import_library

Collate: TypeAlias = Callable[[list[Any]], Any]
"""Function from the samples of a batch to the batch."""
TARGETS = ("targets", "labels")
"""Keys of a batch that are for the loss, not for the model."""


def is_stream(dataset: object) -> bool:
    """Return True for an iterable dataset or a loader, which has no samples by number."""
    by_number = getattr(dataset, "__getitem__", None) is not None and not isinstance(dataset, IterableDataset)
    return isinstance(dataset, Iterable) and not by_number


def sample_source(dataset: Any, *, saved: Mapping[str, Any]) -> Any:
    """Return a stream as a `SampleStream` from the place `saved`, and a map-style dataset as it is."""
    return SampleStream(dataset, saved=saved) if is_stream(dataset) else dataset


class SampleStream:
    """The samples of an iterable dataset, over and over. `saved`: a result of `state`; {}: from the first sample.

    An epoch begins with `dataset.set_epoch(epoch)`, if the dataset has this method. A dataset with `state_dict` and
    `load_state_dict` continues from its state, if the state survives JSON. Otherwise earlier samples are read again."""

    def __init__(self, dataset: Any, *, saved: Mapping[str, Any]) -> None:
        self._dataset = dataset
        self._before, self._end = dict(saved), 0
        self._epoch, self._taken = saved.get("epoch", 0), saved.get("taken", 0)
        # A shuffle buffer of the library datasets is not part of its state.
        is_lossy = any("BufferShuffled" in type(part).__name__ for part in reachable(dataset))
        self._has_state = getattr(dataset, "load_state_dict", None) is not None and not is_lossy
        if "state" in saved:
            self._dataset.load_state_dict(saved["state"])
        self._begin(skip=0 if "state" in saved else self._taken)

    def take(self, count: int, *, stop: int) -> list[Any]:
        """Return the next `count` samples. `stop`: the global number after the last one, with which `state` compares.

        Raises JobError for a dataset without any."""
        self._before, self._end = self._position() if self._end else self._before, stop
        found: list[Any] = []
        while more := count - len(found):
            samples = list(islice(self._samples, more))
            found, self._taken = found + samples, self._taken + len(samples)
            if not self._taken:
                raise JobError("data.dataset yields no samples; check what it reads")
            if len(samples) < more:
                self._epoch, self._taken = self._epoch + 1, 0
                self._begin(skip=0)
        return found

    def state(self, samples: int) -> dict[str, Any]:
        """Return the JSON state after `samples` samples of the run.

        If the last `take` has samples after these, it is the state before that `take`."""
        position = self._position() if samples >= self._end else self._before
        with contextlib.suppress(TypeError):
            if json.loads(json.dumps(position)) == position:
                return position
        return {key: position[key] for key in ("epoch", "taken")}

    def _begin(self, *, skip: int) -> None:
        if (set_epoch := getattr(self._dataset, "set_epoch", None)) is not None:
            set_epoch(self._epoch)
        self._samples = islice(iter(self._dataset), skip, None)

    def _position(self) -> dict[str, Any]:
        state = {"state": self._dataset.state_dict()} if self._has_state else {}
        return {"epoch": self._epoch, "taken": self._taken, **state}


def without_targets(model: nn.Module, batch: Any) -> Any:
    """Call the model as `default_forward` does, without the targets of a batch."""
    if isinstance(batch, Mapping):
        batch = {key: value for key, value in batch.items() if key not in TARGETS}
    return default_forward(model, batch)


def pad(samples: Sequence[Any], *, multiple: int = 1) -> Any:
    """Return samples as one batch, each padded at its end to the longest, or to a `multiple` above it.

    Padding is 0, but -100 in `targets`, in `labels` and in the later items of a tuple. Texts are left out. A mapping
    with `input_ids` gets an `attention_mask`."""
    first, is_mapping = samples[0], isinstance(samples[0], Mapping)
    if not is_mapping and not isinstance(first, tuple):
        return _padded(samples, multiple, 0)
    keys = [key for key in (first if is_mapping else range(len(first))) if not isinstance(first[key], str)]
    columns = {key: [one[key] for one in samples] for key in keys}
    if "input_ids" in columns:
        columns.setdefault("attention_mask", [torch.ones(len(row), dtype=torch.int64) for row in columns["input_ids"]])
    ignored = TARGETS if is_mapping else keys[1:]
    batch = {key: _padded(rows, multiple, IGNORED if key in ignored else 0) for key, rows in columns.items()}
    return batch if is_mapping else tuple(batch.values())


def _padded(rows: Sequence[Any], multiple: int, fill: int) -> Tensor:
    tensors = [torch.as_tensor(row) for row in rows]
    if not tensors[0].dim():
        return torch.stack(tensors)
    batch = nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)
    tail = batch.new_full((len(batch), -batch.shape[1] % multiple, *batch.shape[2:]), fill)
    return torch.cat([batch, tail], dim=1)


def pack(samples: Sequence[Mapping[str, Any]], *, context: int) -> dict[str, Tensor]:
    """Return rows of `context` tokens, each with as many of the next samples as fit; longer samples are truncated.

    A sample has `input_ids`, and `targets` at the same positions or `labels` one token later; else each token is a
    label. `position_ids` begin anew with each sample."""
    rows: list[Tensor] = []  # tokens, targets and positions of each: (3, length)
    for sample in samples:
        tokens = torch.as_tensor(sample["input_ids"])
        labels = torch.as_tensor(sample.get("labels", tokens))
        targets = torch.as_tensor(sample.get("targets", nn.functional.pad(labels[1:], (0, 1), value=IGNORED)))
        part = torch.stack([tokens, targets, torch.arange(len(tokens))])[:, :context]
        if rows and rows[-1].shape[1] + part.shape[1] <= context:
            part = torch.cat([rows.pop(), part], dim=1)
        rows.append(part)
    filler = torch.tensor([0, IGNORED, 0])[:, None].repeat(1, context)
    filler[2] = torch.arange(context)
    batch = torch.stack([torch.cat([row, filler[:, : context - row.shape[1]]], dim=1) for row in rows], dim=1)
    return dict(zip(("input_ids", "targets", "position_ids"), batch, strict=True))


def named_collator(job: DataJob) -> Collate | None:
    """Return the collator that a job names; None without one. Raises JobError for an unknown name or argument."""
    name, arguments, key = job.collator, dict(job.collator_arguments), "data.collator_arguments"
    if name is None:
        return None
    found: Any = {"pad": pad, "pack": partial(pack, context=job.context)}.get(name)
    if found is None and ":" not in name:
        raise JobError(f"data.collator = {name!r} is none of pad, pack, hf:CLASS and module:function")
    if name.startswith(HUB):
        classes = {each for each in dir(import_library("transformers", key="data.collator")) if "Collator" in each}
        if (own := name.removeprefix(HUB)) not in classes:
            raise JobError(f"data.collator = {name!r}: transformers has no {own!r}; {name_hint(own, known=classes)}")
    found = found or locate(name.replace(HUB, "transformers:"), key="data.collator")
    if not inspect.isclass(found):
        bind(partial(found, []), arguments=arguments, key=key)
        return partial(found, **arguments)
    if job.tokenizer:
        auto = import_library("transformers", key="data.tokenizer").AutoTokenizer
        arguments["tokenizer"] = auto.from_pretrained(hub_folder(job.tokenizer, key="data.tokenizer"))
    elif "tokenizer" in inspect.signature(found).parameters and "tokenizer" not in arguments:
        raise JobError(f'data.collator = {name!r} takes a tokenizer; add data.tokenizer = "hf:FOLDER"')
    return bind(found, arguments=arguments, key=key)()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Batches(Dataset[list[Any]]):
    """Dataset whose items are lists of batches. An index is a range of numbers: `range(0, 8, 4)` is two batches of 4.

    | source   the user's dataset
    | order    maps a global number to the number of a sample; None: they are equal
    | window   number of batches whose samples are sorted by length together; an index then names one window"""

    source: Any
    order: Any
    collate: Collate
    window: int

    def __getitem__(self, numbers: range) -> list[Any]:
        start, stop, step = numbers.start, numbers.stop, numbers.step
        seed = start + (self.order.seed if self.order else 0)
        if isinstance(self.source, SampleStream):
            samples = self.source.take(stop - start, stop=stop)
        else:
            indices = self.order.indices(start, stop=stop) if self.order else range(start, stop)
            samples = [self.source[index] for index in indices]
        order = list(range(0, len(samples), step))
        made = []
        with torch.random.fork_rng(devices=[]):  # a collator may draw, and every rank has to draw the same numbers
            torch.default_generator.manual_seed(seed)
            if self.window > 1:
                samples.sort(key=_length)
                order = [step * number for number in torch.randperm(self.window).tolist()]
            for number, at in enumerate(order):
                torch.default_generator.manual_seed(seed + number * step)
                made.append(self.collate(samples[at : at + step]))
        return made


def _length(sample: Any) -> int:
    items = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, tuple) else [sample]
    return max((len(item) for item in items if np.ndim(item)), default=0)
