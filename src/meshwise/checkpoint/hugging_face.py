"""Read folders of Hugging Face as checkpoints, and write them from checkpoints.

    config.json
    model.safetensors                              or, in parts:
    model-00001-of-00003.safetensors …
    model.safetensors.index.json                   {"weight_map": {tensor: file}}

`read_pretrained` reads such a folder as an index of whole tensors, so each rank loads only its rectangles, under any
plan. It has no checksums. Names stay as in the model: nothing is renamed, transposed or fused. `write_pretrained`
writes a folder; `export` also compares the logits of the written and the saved model on random tokens.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.checkpoint.checkpoint_errors import Damage, DamageError
from meshwise.checkpoint.checkpoint_index import (
    INDEX,
    CheckpointFile,
    CheckpointIndex,
    StoredRectangle,
    StoredTensor,
    plain_name,
    read_index,
)
from meshwise.checkpoint.load_state import CheckpointReader
from meshwise.checkpoint.safetensors_format import DTYPES, TensorSpec, header, read_header
from meshwise.data_parallel.stored_slices import StoredSlice, buffers
from meshwise.layout.rectangles import Rectangle

PARTS = "model.safetensors.index.json"
WHOLE = "model.safetensors"
_PART_BYTES = 5 * 10**9
"""Bytes of a part; a tensor is never divided."""


def read_pretrained(folder: Path) -> CheckpointIndex:
    """Return the tensors of a folder of safetensors files, each whole, under both slots `parameter` and `buffer`.

    Raises DamageError for a folder without such files, and for files that contradict their headers.
    """
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, CheckpointFile] = {}
    for name in _files(folder):
        path = folder / name
        try:
            entries = read_header(path)
            files[name] = CheckpointFile(path.stat().st_size, ())
        except OSError as error:
            raise DamageError([Damage(str(path), "a safetensors file", error.strerror or str(error))]) from error
        for entry in entries.values():
            whole = Rectangle((0,) * len(entry.shape), entry.shape)
            parts = (StoredRectangle(name, entry.name, whole),) if whole.numel else ()
            for slot in ("parameter", "buffer"):
                tensors[f"{slot}/{entry.name}"] = StoredTensor(entry.dtype, entry.shape, parts)
    return CheckpointIndex(folder, 0, files, tensors, aliases={}, extra={})


def _files(folder: Path) -> list[str]:
    """Return the names of the files that hold the tensors.

    Raises DamageError when the folder does not name them, or names a file outside of it.
    """
    if not (folder / PARTS).is_file():
        if not (folder / WHOLE).is_file():
            raise DamageError([Damage(str(folder), f"{WHOLE} or {PARTS}", "neither")])
        return [WHOLE]
    try:
        weights = json.loads((folder / PARTS).read_text(encoding="utf-8"))["weight_map"]
        return sorted({plain_name(name) for name in weights.values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DamageError([Damage(str(folder / PARTS), "a weight_map", str(error))]) from error


def with_model_names(index: CheckpointIndex, *, names: Mapping[str, Sequence[str]], base: str = "") -> CheckpointIndex:
    """Return the same tensors under the names that a model has for them.

    `names` maps each first name to all names of the parameter. A folder of the model without its head names
    `transformer.h.0` just `h.0`. `base` is that prefix; it is added or removed where a name is not found unchanged.
    """
    tensors = dict(index.tensors)
    for first, all_of_them in names.items():
        for slot in ("parameter", "buffer"):
            candidates = (f"{slot}/{other}" for name in all_of_them for other in _variants(name, base))
            found = next((key for key in candidates if key in index.tensors), None)
            if found is not None:
                tensors[f"{slot}/{first}"] = index.tensors[found]
    return CheckpointIndex(index.folder, index.sequence, index.files, tensors, index.aliases, index.extra)


def unused_entries(index: CheckpointIndex, *, names: Mapping[str, Sequence[str]], base: str = "") -> list[str]:
    """Return the entries of a folder whose names the model does not have."""
    known = {other for all_of_them in names.values() for name in all_of_them for other in _variants(name, base)}
    entries = {part.entry for stored in index.tensors.values() for part in stored.parts}
    return sorted(entries - known)


def is_pretrained(folder: Path) -> bool:
    """Return whether a folder holds a model in the layout of Hugging Face, and no checkpoint."""
    return not (folder / INDEX).exists() and any((folder / name).is_file() for name in (WHOLE, PARTS))


def _variants(name: str, base: str) -> tuple[str, ...]:
    return (name, name.removeprefix(f"{base}."), f"{base}.{name}") if base else (name,)


def write_pretrained(reader: CheckpointReader, *, into: Path, dtypes: Mapping[str, torch.dtype]) -> list[Path]:
    """Write the parameters and buffers of a checkpoint into a new folder, in the layout and under the names of a model.

    `dtypes`: dtypes of parameters whose dtype in the model differs from the checkpoint. A few MB at a time are in
    memory. Returns the files. Raises DamageError, or OSError (FileExistsError: the folder holds a model already);
    partly written files are removed.
    """
    split = {key: key.partition("/") for key in reader.index.tensors}
    stored = {name: key for key, (slot, _, name) in split.items() if slot in ("parameter", "buffer")}
    specs = [
        TensorSpec(name, dtypes.get(name, reader.index.tensors[key].dtype), reader.index.tensors[key].shape)
        for name, key in stored.items()
    ]
    files = _divide(specs)
    into.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undoing:
        for file, group in files.items():
            with (into / file).open("xb") as out:
                undoing.callback((into / file).unlink)
                out.write(header(group, metadata={}))
                for spec in group:
                    for piece in reader.pieces(stored[spec.name]):
                        out.write(piece.to(spec.dtype).view(torch.uint8).numpy().data)
                out.flush()
                os.fsync(out.fileno())
        if len(files) > 1:
            table = {
                "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
                "weight_map": {spec.name: file for file, group in files.items() for spec in group},
            }
            undoing.callback((into / PARTS).unlink, missing_ok=True)
            (into / PARTS).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        undoing.pop_all()
    return [into / file for file in files]


def _divide(specs: Iterable[TensorSpec]) -> dict[str, list[TensorSpec]]:
    """Return the tensors of each file by its name, in the order given; a file has at most `_PART_BYTES`."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > _PART_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    if len(groups) == 1:
        return {WHOLE: groups[0]}
    names = (f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1))
    return dict(zip(names, groups, strict=True))


_TOKENS = (4, 8)
"""Rows and length of the random tokens that an export is checked with."""
_BOUND = 1e-5
"""The largest difference of logits that reordered sums can explain, relative to the largest logit."""


class ExportError(RuntimeError):
    """The exported model differs from the saved one; the message says how far apart their logits are."""


@dataclass(frozen=True)
class ExportResult:
    """Result of an export: the written files, and the largest difference between the logits of both models."""

    files: Sequence[Path]
    difference: float


def export(folder: Path, *, into: Path, build: Callable[[], nn.Module]) -> ExportResult:
    """Write the model of a checkpoint into a new folder, read it back and compare the logits of both.

    `build` makes the module that was trained. One of transformers leaves its `config.json` too, and is read back by
    transformers itself. Both models run on the same random tokens, whole, on the CPU.

    Raises ValueError, and has written nothing, when `build` makes another model, or one that does not make logits of
    tokens alone; ExportError when the logits differ; DamageError, OSError.
    """
    reader = CheckpointReader(read_index(folder))
    saved = build().eval()
    _fill(saved, reader)
    tokens, expected = _random_test(saved)
    # Parameters whose masters are wider: TrainingState has noted their own dtypes.
    dtypes = {name: DTYPES[word] for name, word in reader.index.extra.get("dtypes", {}).items()}
    files = write_pretrained(reader, into=into, dtypes=dtypes)
    config = getattr(saved, "config", None)
    if _is_transformers(saved) and config is not None:
        config.save_pretrained(into)
        files += sorted(into.glob("*config.json"))
    difference = float((_logits(_read_back(saved, into, build), tokens) - expected).abs().max())
    if not difference <= _BOUND * float(expected.abs().max()):
        raise ExportError(
            f"the logits of {into} and {folder} differ by up to {difference:.3g} on random tokens; delete the export"
        )
    return ExportResult(files, difference)


def _fill(module: nn.Module, reader: CheckpointReader) -> None:
    """Give a whole module the values of a checkpoint. Raises ValueError when they are of another model."""
    parameters = [
        StoredSlice.of_full(parameter.detach(), name=name, slot="parameter")
        for name, parameter in module.named_parameters()
    ]
    reader.fill([*parameters, *(buffer for buffer in buffers([module]) if buffer.key in reader.index.tensors)])


def _read_back(saved: nn.Module, folder: Path, build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that is in a folder: read by transformers, if its class comes from there."""
    if _is_transformers(saved):
        dtype = next(saved.parameters()).dtype
        model: nn.Module = type(saved).from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
        return model.eval()
    module = build().eval()
    names = {name: (name,) for name, _ in module.named_parameters()}
    _fill(module, CheckpointReader(with_model_names(read_pretrained(folder), names=names)))
    return module


def _is_transformers(module: nn.Module) -> bool:
    return any(kind.__module__.partition(".")[0] == "transformers" for kind in type(module).__mro__)


def _random_test(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return random tokens and the logits of a model for them. Raises ValueError when tokens alone give no logits."""
    why = "it has no embedding, so it takes no tokens"
    embedding = next((part for part in module.modules() if isinstance(part, nn.Embedding)), None)
    if embedding is not None:
        tokens = torch.randint(embedding.num_embeddings, _TOKENS, generator=torch.Generator().manual_seed(0))
        try:
            return tokens, _logits(module, tokens)
        except Exception as error:  # noqa: BLE001 - a user's model may fail in any way
            why = f"of tokens alone it makes {type(error).__name__}: {error}"
    raise ValueError(
        f"the export of {type(module).__name__} could not be checked, so nothing was written: {why}. Its parameters "
        "are in parameters.safetensors of the run, under its own names"
    )


def _logits(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of a model for `tokens`; an encoder-decoder gets them on both sides."""
    decodes = _is_transformers(module) and getattr(module.config, "is_encoder_decoder", False)
    given = {"decoder_input_ids": tokens} if decodes else {}
    with torch.no_grad():
        output: Any = module(tokens, **given)
    logits = output["logits"] if isinstance(output, Mapping) else output
    if not isinstance(logits, Tensor):
        raise ValueError(f"{type(module).__name__} returns a {type(logits).__name__}, not logits")  # noqa: TRY004
    return logits.double()
