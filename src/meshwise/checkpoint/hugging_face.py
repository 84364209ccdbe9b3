"""Read a model from a folder in the layout of Hugging Face.

    config.json                                    of transformers models; never read here
    model.safetensors                              or, in parts:
    model-00001-of-00003.safetensors …
    model.safetensors.index.json                   {"weight_map": {tensor: file}}

`read_pretrained` returns an index of the full tensors in the files, so each rank can load only its rectangles, under
any plan. The files have no checksums. Tensors keep the model's names; only tensors for single experts are read into
fused experts. Nothing is transposed. `export_model.py` writes such a folder."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwise.checkpoint.checkpoint_errors import Damage, DamageError
from meshwise.checkpoint.checkpoint_index import (
    INDEX,
    CheckpointFile,
    CheckpointIndex,
    StoredRectangle,
    StoredTensor,
    plain_name,
)
from meshwise.checkpoint.safetensors_format import read_header
from meshwise.layout.layout import Rectangle

PARTS = "model.safetensors.index.json"
"""File that says which file holds each tensor, for a model in several files."""
WHOLE = "model.safetensors"
"""File of a model in one file."""
_FUSED: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_OTHER_NAMES: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Names of an expert's matrices in Mixtral's folders."""
_RENAMED = (".block_sparse_moe.", ".mlp.")
"""Part of the names in Mixtral's folders, and the name in its modules."""


def read_pretrained(folder: Path) -> CheckpointIndex:
    """Return an index of the tensors in a folder of safetensors files, each as one rectangle.

    Each tensor is listed in both slots, `parameter` and `buffer`, because the files do not say which one it is.
    Raises DamageError for a folder without such files, and for files that contradict their headers."""
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


def with_fused_experts(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a folder, by `slot/name`, with further entries: fused experts, and names of Mixtral.

    Each tensor of an expert is a rectangle of the fused tensor. So a rank reads only the experts that it holds.

    | mlp.experts.0.gate_proj.weight (inner, features)  ┐
    | mlp.experts.0.up_proj.weight   (inner, features)  ├─ mlp.experts.gate_up_proj (experts, 2 · inner, features)
    | mlp.experts.1.gate_proj.weight …                  ┘
    | mlp.experts.0.down_proj.weight (features, inner)  ── mlp.experts.down_proj    (experts, features, inner)"""
    found = {name.replace(*_RENAMED): tensor for name, tensor in tensors.items()} | dict(tensors)
    experts: dict[str, dict[tuple[int, str], StoredTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name.replace(*_RENAMED))
        if match and len(tensor.shape) == 2:
            experts[match[1]][int(match[2]), _OTHER_NAMES.get(match[3], match[3])] = tensor
    for holder, parts in experts.items():
        count = 1 + max(number for number, _ in parts)
        for fused, matrices in _FUSED.items():
            pieces = [
                (number, row, parts.get((number, key))) for number in range(count) for row, key in enumerate(matrices)
            ]
            present = [piece for _, _, piece in pieces if piece is not None]
            if len(present) == len(pieces) and len({piece.shape for piece in present}) == 1:
                rows, columns = present[0].shape
                placed = tuple(
                    StoredRectangle(part.file, part.entry, Rectangle((number, row * rows, 0), (1, rows, columns)))
                    for number, row, piece in pieces
                    for part in (piece.parts if piece is not None else ())
                )
                found[f"{holder}.{fused}"] = StoredTensor(
                    present[0].dtype, (count, rows * len(matrices), columns), placed
                )
    return found


def _files(folder: Path) -> list[str]:
    """Return the names of the files that hold the tensors, in alphabetical order.

    Raises DamageError if the folder has neither of the two files, or lists a file outside of the folder."""
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
    """Return the index in which each tensor of the model is also listed under its first name.

    | names   all names of each parameter or buffer of the model, by its first name
    | base    prefix of the base model, such as `transformer`; "" for none. A folder without the head has `h.0` for
    |         `transformer.h.0`, so a name that is not found is also looked up with and without this prefix"""
    tensors = dict(index.tensors)
    for first, all_of_them in names.items():
        for slot in ("parameter", "buffer"):
            candidates = (f"{slot}/{other}" for name in all_of_them for other in _variants(name, base))
            found = next((key for key in candidates if key in index.tensors), None)
            if found is not None:
                tensors[f"{slot}/{first}"] = index.tensors[found]
    return CheckpointIndex(index.folder, index.sequence, index.files, tensors, index.aliases, index.extra)


def unused_entries(index: CheckpointIndex, *, names: Mapping[str, Sequence[str]], base: str = "") -> list[str]:
    """Return the sorted names of tensors in the files that the model lacks. `names`, `base`: see `with_model_names`."""
    known = {other for all_of_them in names.values() for name in all_of_them for other in _variants(name, base)}
    entries = {part.entry for stored in index.tensors.values() for part in stored.parts}
    own = [index.tensors[key] for name in known if (key := f"parameter/{name}") in index.tensors]
    return sorted(entries - known - {part.entry for stored in own for part in stored.parts})


def is_pretrained(folder: Path) -> bool:
    """Return whether a folder holds a model in the layout of Hugging Face, and is not a checkpoint."""
    return not (folder / INDEX).exists() and any((folder / name).is_file() for name in (WHOLE, PARTS))


def _variants(name: str, base: str) -> tuple[str, ...]:
    return (name, name.removeprefix(f"{base}."), f"{base}.{name}") if base else (name,)
