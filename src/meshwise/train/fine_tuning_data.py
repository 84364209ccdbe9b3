"""Turn texts, prompts and chats into rows of tokens with the loss on answers alone (`load_rows`).

docs/fine_tuning.md shows records and a packed row. A record is tokenized once, into a file that ranks map into memory:

    | N words, uint32          R integers, int64            R integers, int64              two integers, int64
    | tokens; bit 31: loss     first word of each record    its first token with a loss    largest token, R"""

import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from meshwise.reference.gpt import IGNORED
from meshwise.train import data_loading
from meshwise.train.console_output import counted
from meshwise.train.job_settings import DataJob, JobError
from meshwise.train.pretrained_model import hub_folder, import_library
from meshwise.train.streams_and_collators import pack, pad, without_targets

Words: TypeAlias = NDArray[np.uint32]
"""Tokens, with bit 31 set where the loss counts."""
Records: TypeAlias = Iterable[tuple[str, Mapping[str, Any]]]
"""Records, each with its place for error messages, as `train.jsonl, line 3`."""
_LOSS = np.uint32(1 << 31)
_FIELDS = ("text", "prompt", "completion", "messages", "tools")
_TOKENIZER_FILES = re.compile(r"(tokenizer|vocab|chat_template|special_tokens|added_tokens).*|merges\.txt|.*\.model")


class TuningRows(Dataset[dict[str, Any]]):
    """Rows of tokens from a cache file: dicts of int64 tensors `(context,)`.

    A target is the next token of the same record, or -100 where it has no loss or is missing. `position_ids` begin anew
    with each packed record. Without `pack`, each record is padded at its end, with an `attention_mask` in place of
    `position_ids`; for a collator, it is not padded. `largest` is the largest token, `summary` a line for the user,
    `content` what a resumed run compares."""

    def __init__(self, path: Path, *, job: DataJob) -> None:
        self._path, self._job, context = path, job, job.context
        self._words = data_loading.open_tokens(path).view(np.uint32)
        self.largest, count = data_loading.open_tokens(path)[-16:].view(np.int64).tolist()
        size = len(self._words) - 4 - 4 * count
        starts, firsts = self._words[size:-4].copy().view(np.int64).reshape(2, -1)
        lengths = np.diff(starts, append=size)
        parts = {"truncate": lengths >= 0, "drop": lengths <= context, "split": -(-lengths // context)}[job.overlong]
        record = np.repeat(np.arange(count), parts)
        skipped = (np.arange(len(record)) - np.repeat(np.cumsum(parts) - parts, parts)) * context
        sizes = np.minimum(lengths[record] - skipped, context)
        useful = (firsts[record] - skipped < sizes) & (sizes > 1)
        self._starts, self._sizes = (starts[record] + skipped)[useful], sizes[useful]
        self._rows = _packed(self._sizes, context) if job.pack else np.arange(len(self._sizes) + 1)
        self.content = f"{counted(size, of='token')}, {data_loading.digest(data_loading.open_tokens(path))}"
        long, lost = np.sum(lengths > context), count - len(np.unique(record[useful]))
        self.summary = (
            f"{counted(count, of='record')} of {counted(size, of='token')}, {long:,} longer than {context:,} "
            f"({job.overlong}), {lost:,} left out; rows are {self._sizes.sum() / max(1, len(self) * context):.0%} full"
        )

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        samples = []
        for part in range(self._rows[index], self._rows[index + 1]):
            words = self._words[self._starts[part] :][: self._sizes[part]]
            tokens = (words & ~_LOSS).astype(np.int64)
            targets = np.append(np.where(words[1:] & _LOSS, tokens[1:], IGNORED), IGNORED)
            samples.append({"input_ids": tokens, "targets": targets})
        if self._job.collator:
            return samples[0]
        context = self._job.context
        batch = pack(samples, context=context) if self._job.pack else pad(samples, multiple=context)
        return {key: rows[0] for key, rows in batch.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the arguments, so that a worker process maps the file again; a pickled map would be a copy."""
        return functools.partial(TuningRows, self._path, job=self._job), ()


def load_rows(job: DataJob) -> data_loading.RunData:
    """Return the datasets of a job with records; tokenize the records into the cache if they are not there.

    Raises JobError for a record that cannot be read, a missing tokenizer, template or library, and for no records."""
    kind, _, where = str(job.dataset).partition(":")
    if job.tokenizer is None:
        raise JobError(f'data.dataset = {job.dataset!r} needs a tokenizer; add data.tokenizer = "hf:FOLDER"')
    if unknown := sorted(set(job.arguments) - set(_FIELDS)):
        raise JobError(f'data.arguments: {unknown[0]!r} is none of {", ".join(_FIELDS)}; write as in text = "content"')
    folder = hub_folder(job.tokenizer, key="data.tokenizer")
    cache = data_loading.cache_folder(job)
    with data_loading.cache_errors(cache):
        files = list(data_loading.text_files(where, key="data.dataset"))
        inputs = [f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
        inputs += [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in tokenizer_files(folder)]
        name = hashlib.sha256(json.dumps([kind, inputs, dict(job.arguments)]).encode()).hexdigest()[:32]
        records = _json_lines(files) if kind == "json" else _library_rows(kind, where, files)
        write = functools.partial(_write, records, folder, job.arguments)
        rows = TuningRows(data_loading.build_once(cache / f"rows-{name}.bin", write=write), job=job)
    if not len(rows):
        raise JobError(f"data.dataset = {job.dataset!r} has no row to train on: {rows.summary}; give more records")
    data = data_loading.load_data(job, made=rows)
    summary = f"{data.summary} of {counted(job.context, of='token')}; {rows.summary}"
    return replace(data, summary=summary, content=rows.content, forward=without_targets, largest=rows.largest)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer in a folder of Hugging Face, sorted."""
    return sorted(path for path in folder.iterdir() if path.is_file() and _TOKENIZER_FILES.fullmatch(path.name))


def _write(records: Records, folder: Path, fields: Mapping[str, str], into: Path) -> None:
    """Write the cache file of some records, as the docstring of this file shows. `folder`: of the tokenizer."""
    starts, firsts, at, largest = array("q"), array("q"), 0, 0
    with into.open("wb") as out:
        for words in _Encoder(folder, fields).words(records):
            losses = np.flatnonzero(words[1:] & _LOSS)
            starts.append(at)
            firsts.append(int(losses[0]) + 1 if len(losses) else len(words))
            largest = max(largest, int((words & ~_LOSS).max(initial=0)))
            at += len(words)
            out.write(words.tobytes())
        for table in (starts, firsts, array("q", [largest, len(starts)])):
            out.write(table.tobytes())


class _Encoder:
    """Tokenizer of records. `fields`: other names of their fields. Raises JobError if it cannot be read."""

    def __init__(self, folder: Path, fields: Mapping[str, str]) -> None:
        try:
            self._tokenizer = import_library("transformers", key="data.tokenizer").AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise JobError(f"data.tokenizer: {folder} has no tokenizer that can be read: {reason}") from error
        if not self._tokenizer.is_fast:
            raise JobError(f"data.tokenizer: {folder} has no tokenizer.json; save a fast tokenizer there")
        self._names = {name: fields.get(name, name) for name in _FIELDS}
        end, sep = self._tokenizer.eos_token_id, self._tokenizer.sep_token_id
        self._begin = _words([token for token in self._tokenizer("").input_ids if token not in (end, sep)], 0)
        self._end = _words([] if end is None else [end], 1)

    def words(self, records: Records) -> Iterator[Words]:
        """Yield the words of each record. Raises JobError for one without the fields that docs/fine_tuning.md lists."""
        records = iter(records)
        while batch := [self._read(record, place) for place, record in itertools.islice(records, 256)]:
            tokenized = self._tokenized([one for one in batch if isinstance(one, tuple)])
            yield from (next(tokenized) if isinstance(one, tuple) else one for one in batch)

    def _read(self, record: Mapping[str, Any], place: str) -> "_Text | Words":
        given = {name: record[field] for name, field in self._names.items() if record.get(field) is not None}
        if "messages" in given:
            return self._chat(given["messages"], given.get("tools"), place)
        names = ("prompt", "completion") if {"prompt", "completion"} <= given.keys() else ("text",)
        if wrong := [name for name in names if not isinstance(given.get(name), str)]:
            raise JobError(
                f"{place} has the fields {', '.join(record) or 'of nothing'}, but needs texts as text, or prompt and "
                f"completion, or messages. For a field of another name: --data.arguments {wrong[0]}=NAME"
            )
        text = "".join(given[name] for name in names)
        return text, [(len(text) - len(given[names[-1]]), len(text))], True

    def _chat(self, messages: Any, tools: Any, place: str) -> "_Text | Words":
        """Return a chat as the tokenizer's template writes it. Answers are the parts that the template marks; without
        marks, the text that each message of the assistant adds."""
        render = functools.partial(self._tokenizer.apply_chat_template, tools=tools)
        if not self._tokenizer.chat_template:
            raise JobError(
                f"{place} has messages, but the tokenizer in {self._tokenizer.name_or_path} has no chat template; "
                "write chat_template.jinja there, or give records with prompt and completion"
            )
        try:
            if re.search(r"\{%-?\s*generation\s*-?%\}", self._tokenizer.get_chat_template(tools=tools)):
                marked = render(messages, return_dict=True, return_assistant_tokens_mask=True)
                return _words(marked["input_ids"], marked["assistant_masks"])
            whole: str = render(messages, tokenize=False)
            turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            before = [render(messages[:i], tokenize=False, add_generation_prompt=True) if i else "" for i in turns]
            after = [render(messages[: i + 1], tokenize=False) for i in turns]
        except Exception as error:  # a template may raise any error
            raise JobError(f"{place}: the chat template refuses it: {type(error).__name__}: {error}") from error
        spans = list(zip(before, after, strict=True))
        if not all(whole.startswith(last) and last.startswith(first) for first, last in spans):
            raise JobError(
                f"{place}: the answers cannot be found, because the chat template changes earlier messages when more "
                "follow; mark answers in it: {% generation %}…{% endgeneration %}"
            )
        return whole, [(len(first), len(last)) for first, last in spans], False

    def _tokenized(self, texts: Sequence["_Text"]) -> Iterator[Words]:
        given = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        found = self._tokenizer([text for text, _, _ in texts] or [""], **given)
        rows = zip(texts, found["input_ids"], found["offset_mapping"], strict=False)
        for (_, answers, framed), tokens, offsets in rows:
            starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T  # a token across the border is of the answer
            words = _words(tokens, sum(((first < ends) & (starts < stop) for first, stop in answers), starts < 0))
            yield np.concatenate([self._begin, words, self._end]) if framed else words


_Text: TypeAlias = tuple[str, list[tuple[int, int]], bool]
"""Text to tokenize, its answers as ranges of characters, and whether it gets the tokens of begin and end."""


def _words(tokens: Any, loss: Any) -> Words:
    return np.array(tokens, np.uint32) | np.array(loss, np.uint32) << np.uint32(31)


def _json_lines(files: Iterable[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path in files:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                record: Any = None
                with contextlib.suppress(ValueError):
                    record = json.loads(line) if line.strip() else None
                if isinstance(record, dict):
                    yield f"{path}, line {number}", record
                elif line.strip():
                    what = f"{path}, line {number} is no JSON object: {line[:40].decode(errors='replace')!r}"
                    raise JobError(f'{what}; write one record a line, as {{"text": "…"}}')


def _library_rows(kind: str, where: str, files: Sequence[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of Parquet files, or of a folder of the library datasets: of its split `train` if it has some."""
    reader = import_library("pyarrow.parquet" if kind == "parquet" else "datasets", key="data.dataset")
    try:
        if kind == "parquet":
            batches = (batch for path in files for batch in reader.ParquetFile(path).iter_batches())
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        else:
            rows = reader.load_from_disk(where)
            rows = rows["train"] if isinstance(rows, Mapping) else rows
        yield from ((f"{where}, row {number}", row) for number, row in enumerate(rows, start=1))
    except (KeyError, OSError, ValueError) as error:
        raise JobError(f"data.dataset = '{kind}:{where}' cannot be read: {error}; name another place") from error


def _packed(sizes: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    """Return the first part of each row, and the number of parts. A row takes as many of the next parts as fit."""
    ends, rows = np.cumsum(sizes), [0]
    following = np.searchsorted(ends, ends - sizes + context, side="right")
    while rows[-1] < len(sizes):
        rows.append(int(following[rows[-1]]))
    return np.array(rows)
