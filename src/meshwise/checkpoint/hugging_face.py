"""Load a model from a folder in the layout of Hugging Face, and export a checkpoint to such a folder.

    config.json                                    of transformers models; written, never read here
    model.safetensors                              or, in parts:
    model-00001-of-00003.safetensors …
    model.safetensors.index.json                   {"weight_map": {tensor: file}}

`read_pretrained` returns an index of the full tensors in the files. So each rank loads only its rectangles, under any
plan. There are no checksums. Tensors keep the names of the model; only tensors for single experts are read into fused
experts. Nothing is transposed.
`write_pretrained` writes a folder. `export` also compares the logits of the written and the saved model.
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
from meshwise.checkpoint.fused_experts import with_fused_experts
from meshwise.checkpoint.load_state import CheckpointReader
from meshwise.checkpoint.safetensors_format import DTYPES, TensorSpec, header, read_header
from meshwise.data_parallel.stored_slices import StoredSlice, buffers
from meshwise.layout.rectangles import Rectangle

PARTS = "model.safetensors.index.json"
"""File that names the file of each tensor, for a model in several files."""
WHOLE = "model.safetensors"
"""File of a model in one file."""
_PART_BYTES = 5 * 10**9
"""Most bytes of a file; a larger tensor has its own file, because no tensor is divided."""


def read_pretrained(folder: Path) -> CheckpointIndex:
    """Return an index of the tensors in a folder of safetensors files, each as one rectangle.

    Each tensor is listed twice, in the slots `parameter` and `buffer`, because the files do not say which it is.
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
    return CheckpointIndex(folder, 0, files, with_fused_experts(tensors), aliases={}, extra={})


def _files(folder: Path) -> list[str]:
    """Return the names of the files that hold the tensors, in alphabetical order.

    Raises DamageError if the folder has neither of the two files, or lists a file outside of the folder.
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
    """Return the index with each tensor of the model listed under its first name too.

    | names   all names of each parameter or buffer of the model, by its first name
    | base    prefix of the base model, such as `transformer`: a folder of the model without its head has `h.0` for
    |         `transformer.h.0`. A name that is not found is looked up without and with this prefix; "" for no prefix
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
    """Return the names of tensors in the files that the model does not have, sorted. Arguments as above."""
    known = {other for all_of_them in names.values() for name in all_of_them for other in _variants(name, base)}
    entries = {part.entry for stored in index.tensors.values() for part in stored.parts}
    own = [index.tensors[key] for name in known if (key := f"parameter/{name}") in index.tensors]
    return sorted(entries - known - {part.entry for stored in own for part in stored.parts})


def is_pretrained(folder: Path) -> bool:
    """Return whether a folder holds a model in the layout of Hugging Face, and is not a checkpoint."""
    return not (folder / INDEX).exists() and any((folder / name).is_file() for name in (WHOLE, PARTS))


def _variants(name: str, base: str) -> tuple[str, ...]:
    return (name, name.removeprefix(f"{base}."), f"{base}.{name}") if base else (name,)


def write_pretrained(reader: CheckpointReader, *, into: Path, dtypes: Mapping[str, torch.dtype]) -> list[Path]:
    """Write the parameters and buffers of a checkpoint as safetensors files into a folder, and return their paths.

    `dtypes`: dtypes by name, for parameters that are written in another dtype than the checkpoint has. At most a few MB
    of tensors are in memory. The folder is created if it does not exist. Raises FileExistsError if the folder holds a
    model already. Raises DamageError or OSError; the files are removed.
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
    """Return the tensors of each file by the file's name, in the given order. Files have at most `_PART_BYTES`."""
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
"""Shape (batch, tokens) of the random tokens that check an export."""
_BOUND = 1e-5
"""The largest difference of logits that reordered sums can explain, relative to the largest logit."""


class ExportError(RuntimeError):
    """Error for an exported model that computes other logits than the saved model."""


@dataclass(frozen=True)
class ExportResult:
    """Result of an export: the written files, and the largest absolute difference between both models' logits."""

    files: Sequence[Path]
    difference: float


def export(folder: Path, *, into: Path, build: Callable[[], nn.Module]) -> ExportResult:
    """Write the model of a checkpoint into a folder, read it back, and compare the logits of both models.

    `build` makes the module that was trained. For a transformers model, `config.json` is written too, and
    `from_pretrained` reads the folder. Both models run on the same random tokens, unsplit, on the CPU. Raises
    ValueError before writing, if `build` makes another model, or a model that does not compute logits from tokens
    alone. Raises ExportError if the logits differ; the files stay. Raises DamageError, OSError.
    """
    reader = CheckpointReader(read_index(folder))
    saved = build().eval()
    _fill(saved, reader)
    tokens, expected = _random_test(saved)
    # The checkpoint has the fp32 masters of narrower parameters; TrainingState puts the parameters' dtypes into extra.
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
    """Load a checkpoint into an unsplit module. Raises ValueError if the checkpoint is of another model."""
    parameters = [
        StoredSlice.of_full(parameter.detach(), name=name, slot="parameter")
        for name, parameter in module.named_parameters()
    ]
    reader.fill([*parameters, *(buffer for buffer in buffers([module]) if buffer.key in reader.index.tensors)])


def _read_back(saved: nn.Module, folder: Path, build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model of a folder. If its class is from transformers, `from_pretrained` reads it."""
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
    """Return random tokens and a model's logits for them. Raises ValueError if it needs more than tokens."""
    why = "it has no embedding, so it takes no tokens"
    embedding = next((part for part in module.modules() if isinstance(part, nn.Embedding)), None)
    if embedding is not None:
        tokens = torch.randint(embedding.num_embeddings, _TOKENS, generator=torch.Generator().manual_seed(0))
        try:
            return tokens, _logits(module, tokens)
        except Exception as error:  # noqa: BLE001 - a user's model may fail in any way
            why = f"given only tokens, it raises {type(error).__name__}: {error}"
    raise ValueError(
        f"the export of {type(module).__name__} could not be checked, so nothing was written: {why}. Use the file "
        "parameters.safetensors of the run: it has the parameters, under the names of the module"
    )


def _logits(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of a model for `tokens`, in float64. An encoder-decoder gets the tokens as both inputs."""
    decodes = _is_transformers(module) and getattr(module.config, "is_encoder_decoder", False)
    given = {"decoder_input_ids": tokens} if decodes else {}
    with torch.no_grad():
        output: Any = module(tokens, **given)
    logits = output["logits"] if isinstance(output, Mapping) else output
    if not isinstance(logits, Tensor):
        raise ValueError(f"{type(module).__name__} returns a {type(logits).__name__}, not logits")  # noqa: TRY004
    return logits.double()
