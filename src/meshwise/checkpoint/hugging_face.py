"""Read a model from a folder in the layout of Hugging Face (`read_pretrained`), and export one to it (`export`).

    config.json                                    of transformers models; not read by `read_pretrained`
    model.safetensors                              or, in parts:
    model-00001-of-00003.safetensors …
    model.safetensors.index.json                   {"weight_map": {tensor: file}}

`read_pretrained` returns an index of the full tensors, so each rank can load only its rectangles under any plan.
Tensors keep their names, but the tensors of single experts also become parts of fused experts. None is transposed.

docs/checkpoints.md has the files that an export of each kind of model writes, and their readers ("Hugging Face")."""

import contextlib
import errno
import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwise.base.atomic_file import sync_to_disk, write_whole
from meshwise.checkpoint.checkpoint_folder import CheckpointReader
from meshwise.checkpoint.checkpoint_format import (
    DTYPES,
    INDEX,
    CheckpointFile,
    CheckpointIndex,
    Damage,
    DamageError,
    StoredRectangle,
    StoredTensor,
    plain_name,
    read_header,
    read_index,
)
from meshwise.data_parallel.checkpoint_slices import StoredSlice, buffers
from meshwise.layout.layout import Rectangle
from meshwise.model.deferred_init import is_quantized

PARTS = "model.safetensors.index.json"
"""File that says which file holds each tensor, for a model in several files."""
WHOLE = "model.safetensors"
_FUSED: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_OTHER_NAMES: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Names of an expert's matrices in Mixtral's folders."""
_RENAMED = (".block_sparse_moe.", ".mlp.")
"""Part of each name in Mixtral's folders, and the same part in the names of its modules."""


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
            places = [(number, row, key) for number in range(count) for row, key in enumerate(matrices)]
            present = [parts[number, key] for number, _, key in places if (number, key) in parts]
            if len(present) == len(places) and len({piece.shape for piece in present}) == 1:
                rows, columns = present[0].shape
                placed = tuple(
                    StoredRectangle(part.file, part.entry, Rectangle((number, row * rows, 0), (1, rows, columns)))
                    for (number, row, _), piece in zip(places, present, strict=True)
                    for part in piece.parts
                )
                shape = (count, rows * len(matrices), columns)
                found[f"{holder}.{fused}"] = StoredTensor(present[0].dtype, shape, placed)
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


def with_model_names(
    index: CheckpointIndex, *, names: Mapping[str, Sequence[str]], base: str = ""
) -> tuple[CheckpointIndex, list[str]]:
    """Return an index that also lists each tensor of the model under its first name, and the sorted unused names.

    An unused name is the name of a tensor in the files that the model does not have.

    | names   all names of each parameter or buffer of the model, by its first name
    | base    prefix of the base model, such as `transformer`; "" for none. A folder saved without the head lacks
    |         the prefix (`h.0`, not `transformer.h.0`). So each name is looked up as it is, without it and with it"""
    tensors = dict(index.tensors)
    unused = {part.entry for stored in index.tensors.values() for part in stored.parts}
    for first, all_of_them in names.items():
        bare = [name.removeprefix(f"{base}.") for name in all_of_them if base]
        variants = [*all_of_them, *bare, *(f"{base}.{name}" for name in all_of_them if base)]
        for slot in ("parameter", "buffer"):
            found = [stored for name in variants if (stored := index.tensors.get(f"{slot}/{name}")) is not None]
            tensors |= {f"{slot}/{first}": stored for stored in found[:1]}
            unused -= {*variants, *(part.entry for stored in found for part in stored.parts)}
    return replace(index, tensors=tensors), sorted(unused)


def is_pretrained(folder: Path) -> bool:
    """Return whether a folder holds a model in the layout of Hugging Face, and is not a checkpoint."""
    return not (folder / INDEX).exists() and any((folder / name).is_file() for name in (WHOLE, PARTS))


ADAPTER = "adapter_model.safetensors"
_PART_BYTES = 5 * 10**9
"""Most bytes of a file; a larger tensor has its own file, because no tensor is divided."""


class ExportError(RuntimeError):
    """Error for an exported model that computes other logits than the saved model."""


@dataclass(frozen=True)
class ExportResult:
    """Result of an export: the written files, and the largest absolute difference between both models' logits."""

    files: Sequence[Path]
    difference: float


def export(
    folder: str | Path, *, into: str | Path, build: Callable[[], nn.Module], merge: bool = False, average: bool = False
) -> ExportResult:
    """Write the model of a checkpoint into a folder, read it back, and compare the logits of both models.

    `build` makes the module that was trained. Both models run on the same random tokens, unsplit, on the CPU.

    | merge     add the adapters of a PEFT model to its base model, and write this model
    | average   write the averages that `Trainer.average` kept, in place of the parameters

    Raises ValueError if `build` makes another model, or a model that does not compute logits from tokens alone, for
    `merge` without adapters, and for `average` without an average. Raises FileExistsError if `into` holds a model
    already, ExportError if the logits differ; also DamageError and OSError. After an error `into` is unchanged."""
    folder, into = Path(folder), Path(into)
    for name in (WHOLE, PARTS, ADAPTER):
        if (into / name).exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(into / name))
    index = read_index(folder)
    reader = CheckpointReader(averaged(index) if average else index)
    saved = build().eval()
    if merge and not _is_of("peft", saved):
        raise ValueError(f"merge=True, but {type(saved).__name__} is no PEFT model: it has no adapters to merge")
    tensors = _fill(saved, reader)
    tokens, expected = _random_test(saved)
    with _written_when_whole(into) as new:
        if _is_of("peft", saved):
            saved = _base(saved, merge=merge) if merge else saved
            saved.save_pretrained(new)  # type: ignore[operator] # a method of both libraries
        else:
            # The checkpoint has the fp32 master of a narrower parameter; `extra` has the parameter's dtype.
            dtypes = {name: DTYPES[word] for name, word in index.extra.get("dtypes", {}).items()}
            tensors = {name: one.to(dtypes.get(name, one.dtype)) for name, one in tensors.items()}
            if _is_of("transformers", saved):
                _save_published(saved, tensors, into=new)
            else:
                _write(tensors, into=new)
        names = sorted(path.name for path in new.iterdir())
        difference = float((_logits(_read_back(saved, new, build, reader), tokens) - expected).abs().max())
        if not difference <= 1e-5 * float(expected.abs().max()):  # more than reordered sums can explain
            raise ExportError(
                f"the logits of the export and of {folder} differ by up to {difference:.3g} on random tokens, so "
                "nothing was written. Let `build` make the same model at every call"
            )
    return ExportResult([into / name for name in names], difference)


def averaged(index: CheckpointIndex) -> CheckpointIndex:
    """Return the index with each trained parameter replaced by its average. Raises ValueError without averages."""
    average = "optimizer/average/"
    found = {key.removeprefix(average): stored for key, stored in index.tensors.items() if key.startswith(average)}
    if not found:
        raise ValueError(f"{index.folder} was saved without trainer.average(decay), so it has no average to export")
    return replace(index, tensors={**index.tensors, **{f"parameter/{name}": stored for name, stored in found.items()}})


@contextlib.contextmanager
def _written_when_whole(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside `folder`. After the block move its files into `folder`; after an error remove them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"{folder.name}.partial-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as new:
        yield Path(new)
        folder.mkdir(exist_ok=True)
        for path in sorted(Path(new).iterdir()):
            path.replace(folder / path.name)


def _save_published(model: Any, tensors: Mapping[str, Tensor], *, into: Path) -> None:
    """Write a transformers model with the names of published models, or its own if `read_pretrained` needs them."""
    names = {name: (name,) for name in tensors}
    for published in (True, False):
        try:
            model.save_pretrained(into, state_dict=tensors, max_shard_size=_PART_BYTES, save_original_format=published)
        except SafetensorError as error:
            raise OSError(f"{into} was not written: {error}") from error
        found = with_model_names(read_pretrained(into), names=names)[0].tensors
        if all(f"parameter/{name}" in found for name in names):
            break
    for path in into.iterdir():
        sync_to_disk(path)


def _write(tensors: Mapping[str, Tensor], *, into: Path) -> None:
    """Write tensors as safetensors files into a folder; a file has at most `_PART_BYTES`. Raises OSError."""
    groups: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if groups[-1] and sum(each.nbytes for each in (*groups[-1].values(), tensor)) > _PART_BYTES:
            groups.append({})
        groups[-1][name] = tensor.contiguous()
    count = len(groups)
    names = [WHOLE] if count == 1 else [f"model-{one:05}-of-{count:05}.safetensors" for one in range(1, count + 1)]
    for file, group in zip(names, groups, strict=True):
        try:
            write_whole(into / file, write=partial(save_file, group, metadata={"format": "pt"}))
        except SafetensorError as error:
            raise OSError(f"{into / file} was not written: {error}") from error
    if count > 1:
        table = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file for file, group in zip(names, groups, strict=True) for name in group},
        }
        (into / PARTS).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _fill(module: nn.Module, reader: CheckpointReader) -> dict[str, Tensor]:
    """Load a checkpoint into an unsplit module; return the loaded tensors. Raises ValueError for another model."""
    parameters = [
        StoredSlice.of_full(parameter.detach(), name=name, slot="parameter")
        for name, parameter in module.named_parameters()
        if not is_quantized(parameter)
    ]
    known = {name for key in reader.index.tensors for _, _, name in [key.rpartition("/")]}
    wanted = [*parameters, *(buffer for buffer in buffers([module]) if buffer.name in known)]
    reader.fill(wanted)
    return {held.name: held.tensor for held in wanted}


def _read_back(saved: nn.Module, folder: Path, build: Callable[[], nn.Module], reader: CheckpointReader) -> nn.Module:
    """Return the model of a folder, read by its class or `build`. Adapters get the base model of `build`."""
    if _is_of("peft", saved):
        from peft import PeftModel  # noqa: PLC0415 - an extra

        trained = build()
        _fill(trained, reader)
        adapted: nn.Module = PeftModel.from_pretrained(_base(trained, merge=False), folder)
        return adapted.eval()
    if _is_of("transformers", saved):
        dtype = next(saved.parameters()).dtype
        model: nn.Module = type(saved).from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
        return model.eval()
    module = build().eval()
    names = {name: (name,) for name, _ in module.named_parameters()}
    _fill(module, CheckpointReader(with_model_names(read_pretrained(folder), names=names)[0]))
    return module


def _base(adapted: Any, *, merge: bool) -> nn.Module:
    """Return a PEFT model's base model, with adapters added or removed. Raises ValueError if prompts are merged."""
    if any(config.is_prompt_learning for config in adapted.peft_config.values()):
        if merge:
            raise ValueError("merge=True, but learned prompts are inputs and cannot be added to weights; leave it out")
        return adapted.get_base_model()  # type: ignore[no-any-return]
    return adapted.merge_and_unload() if merge else adapted.unload()  # type: ignore[no-any-return]


def _is_of(library: str, module: nn.Module) -> bool:
    """Return whether the class of a model, or a class that it is derived from, is of `library`."""
    return any(kind.__module__.partition(".")[0] == library for kind in type(module).__mro__)


def _random_test(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return random tokens (4, 8) and a model's logits for them. Raises ValueError if it needs more than tokens."""
    why = "it has no embedding, so it takes no tokens"
    embedding = next((part for part in module.modules() if isinstance(part, nn.Embedding)), None)
    if embedding is not None:
        tokens = torch.randint(embedding.num_embeddings, (4, 8), generator=torch.Generator().manual_seed(0))
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
    decodes = _is_of("transformers", module) and getattr(module.config, "is_encoder_decoder", False)
    given = {"decoder_input_ids": tokens} if decodes else {}
    with torch.no_grad():
        output: Any = module(tokens, **given)
    logits = output["logits"] if isinstance(output, Mapping) else output
    if not isinstance(logits, Tensor):
        raise ValueError(f"{type(module).__name__} returns a {type(logits).__name__}, not logits")  # noqa: TRY004
    return logits.double()
