"""From a checkpoint to a Hugging Face folder, and the proof that it is the same model: its logits on random tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.checkpoint.checkpoint_index import read_index
from meshwise.checkpoint.load_state import CheckpointReader
from meshwise.checkpoint.pretrained import dtypes_of, read_pretrained, under_names, write_pretrained
from meshwise.data_parallel.stored_slices import StoredSlice, buffers

_TOKENS = (4, 8)


class ExportError(RuntimeError):
    """The exported model differs from the saved one; the message says how far apart their logits are."""


@dataclass(frozen=True)
class Exported:
    """The files of a folder that has been checked, and the largest difference between the logits of both."""

    files: Sequence[Path]
    difference: float


def export(folder: Path, *, into: Path, build: Callable[[], nn.Module]) -> Exported:
    """Write the model of a checkpoint into a new folder, and compare what is then in it with what was saved.

    `build` makes the module that was trained. One of transformers leaves its `config.json` too, and is read back by
    transformers itself. Both models run on the same random tokens, whole, on the CPU.

    Raises ValueError, and has written nothing, when `build` makes another model, or one that does not make logits of
    tokens alone; ExportError when the logits differ; DamageError, OSError.
    """
    reader = CheckpointReader(read_index(folder))
    saved = build().eval()
    tokens = torch.randint(_vocabulary(saved), _TOKENS, generator=torch.Generator().manual_seed(0))
    dtypes = dtypes_of(reader.index.extra)
    _fill(saved, reader)
    expected = _tried(saved, tokens)
    files = write_pretrained(reader, into=into, dtypes=dtypes)
    config = getattr(saved, "config", None)
    if _is_transformers(saved) and config is not None:
        config.save_pretrained(into)
        files += sorted(into.glob("*config.json"))
    difference = float((_logits(_read_back(saved, into, build), tokens) - expected).abs().max())
    if not difference <= _bound(expected):
        raise ExportError(
            f"the logits of {into} differ from the logits of {folder} by up to {difference:.3g} on random tokens; the "
            "exported model is not the saved one"
        )
    return Exported(files, difference)


def _fill(module: nn.Module, reader: CheckpointReader) -> None:
    """Give a whole module the values of a checkpoint. Raises ValueError when they are of another model."""
    held = [
        StoredSlice.whole(parameter.detach(), name=name, slot="parameter")
        for name, parameter in module.named_parameters()
    ]
    reader.fill([*held, *(held for held in buffers([module]) if held.key in reader.index.tensors)])


def _read_back(saved: nn.Module, folder: Path, build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that is in a folder, read in the way that others would."""
    if _is_transformers(saved):
        dtype = next(saved.parameters()).dtype
        model: nn.Module = type(saved).from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
        return model.eval()
    module = build().eval()
    names = {name: (name,) for name, _ in module.named_parameters()}
    _fill(module, CheckpointReader(under_names(read_pretrained(folder), names=names)))
    return module


def _is_transformers(module: nn.Module) -> bool:
    return any(kind.__module__.partition(".")[0] == "transformers" for kind in type(module).__mro__)


def _vocabulary(module: nn.Module) -> int:
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            return part.num_embeddings
    raise _uncheckable(module, "it has no embedding, so it takes no tokens")


def _tried(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of a model that may fail in any way. Raises ValueError where tokens alone give none."""
    try:
        return _logits(module, tokens)
    except Exception as error:
        raise _uncheckable(module, f"of tokens alone it makes {type(error).__name__}: {error}") from error


def _uncheckable(module: nn.Module, why: str) -> ValueError:
    return ValueError(
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


def _bound(logits: Tensor) -> float:
    """Return the largest difference that reordered sums can explain."""
    return 1e-5 * float(logits.abs().max())
