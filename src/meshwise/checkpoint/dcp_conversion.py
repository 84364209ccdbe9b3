"""Convert checkpoints from and to torch's distributed checkpoint, DCP: `import_dcp` and `export_dcp`.

docs/checkpoints.md has the keys of each format ("torch.distributed.checkpoint (DCP)").

DCP does not say which tensors of the model are buffers. So an import names all tensors `parameter/NAME`, and a load
looks for buffers there too. Import and export have one tensor in memory at a time, and a staging buffer."""

import errno
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.checkpoint.checkpoint_folder import CheckpointReader
from meshwise.checkpoint.checkpoint_format import CheckpointIndex, Damage, DamageError, read_index
from meshwise.checkpoint.hugging_face import averaged
from meshwise.checkpoint.save_state import PendingSave
from meshwise.comm.api.dcp_folder import METADATA, DcpEntry, read_dcp, write_dcp
from meshwise.comm.in_process.thread_and_trace_worlds import TraceWorld
from meshwise.data_parallel.checkpoint_slices import OPTIMIZER_KINDS, StoredSlice, number_slot
from meshwise.optim.build_optimizer import IMPLEMENTATIONS, plain_value

_Stored: TypeAlias = Mapping[tuple[str, ...], DcpEntry]


def import_dcp(folder: str | Path, *, into: str | Path) -> CheckpointIndex:
    """Write the model and the optimizer's state of a DCP folder as the checkpoint `into`, and return its index.

    `folder` may instead contain two DCP folders, one of the model and one of the optimizer, as accelerate writes them.
    Other values are left out. `Trainer.load` returns {"steps": number} with the largest `step` of the optimizer.

    Raises ValueError for state that is numbered instead of named, or of another shape than its parameter. Raises
    DamageError if there is no such folder, SaveError if `into` cannot be written, OSError."""
    folder, into = Path(folder), Path(into)
    places = [place for place in (folder, *sorted(folder.glob("*/"))) if (place / METADATA).is_file()]
    if not places:
        raise DamageError([Damage(str(folder / METADATA), "a folder of torch.distributed.checkpoint", "no such file")])
    stored = {path: entry for place in places for path, entry in read_dcp(place).items()}
    model, (state, groups) = _model(stored), _optimizer(stored)
    trained = {*(name for name, _ in state), *(name for group in groups for name in group["names"])}
    if unknown := sorted(trained - model.keys()):
        raise ValueError(
            f"{folder} has optimizer state for {unknown[0]!r}, but no such tensor of the model. Do not save "
            "optimizer.state_dict(), which numbers the parameters: save get_optimizer_state_dict(model, optimizer), "
            "from torch.distributed.checkpoint.state_dict"
        )
    # State of another shape than its parameter is a number, such as `step`; a parameter may be one number too.
    numbers = {key for (name, key), entry in state.items() if entry.shape != model[name].shape}
    values = {path: entry.read() for path, entry in state.items() if path[1] in numbers}
    tensors = {(name, f"optimizer/{key}"): entry for (name, key), entry in state.items() if key not in numbers}
    tensors |= {(name, "parameter"): entry for name, entry in model.items()}
    metas = [torch.empty(entry.shape or (), dtype=entry.dtype, device="meta") for entry in tensors.values()]
    slices = [StoredSlice.of_full(x, name=name, slot=slot) for (name, slot), x in zip(tensors, metas, strict=True)]
    reads = {id(held.tensor): entry.read for held, entry in zip(slices, tensors.values(), strict=True)}
    for (name, key), value in values.items():
        if value is not None:
            slot, number = number_slot(value, key=key, name=name)
            slices.append(StoredSlice.of_full(number, name=name, slot=slot))
    steps = max((int(value) for (_, key), value in values.items() if key == "step"), default=0)

    def read(tensor: Tensor) -> Tensor:
        found: Tensor = reads[id(tensor)]() if tensor.is_meta else tensor
        return torch.view_as_real(found) if found.is_complex() else found

    extra = {"steps": steps, "skips": 0, "groups": groups, "user": {"steps": steps}}
    world = TraceWorld(rank=0, mesh=Mesh.of(rank=1), device="cpu")
    PendingSave(into, holdings=slices, aliases={}, extra=extra, world=world, read=read).wait()
    return read_index(into)


def _model(stored: _Stored) -> dict[str, DcpEntry]:
    """Return the tensors of the model by name, from the key `model` of the tree, or else from the top of the tree."""
    depth = 1 if any(path[0] == "model" and len(path) > 1 for path in stored) else 0
    return {
        ".".join(path[depth:]): entry
        for path, entry in stored.items()
        if entry.shape is not None and (path[0] == "model" if depth else len(path) == 1)
    }


def _optimizer(stored: _Stored) -> tuple[dict[tuple[str, str], DcpEntry], list[dict[str, Any]]]:
    """Return the state of the optimizer, by the parameter's name and the key, and its groups as `describe_groups` does.

    A stored group has a number and a list of names; or else each parameter has a group."""
    state: dict[tuple[str, str], DcpEntry] = {}
    options: dict[str, dict[str, Any]] = defaultdict(dict)
    for path, entry in stored.items():
        words = ".".join(path).split(".")
        name = ".".join(words[2:-1])
        if words[:2] == ["optimizer", "state"]:
            state[name, words[-1]] = entry
        elif words[:2] == ["optimizer", "param_groups"] and words[-1] != "param_names":
            options[name][words[-1]] = entry.read()
    groups = []
    for name, values in options.items():
        names = [str(member) for member in values.pop("params", [name])]
        groups.append({"names": names, "values": {key: plain_value(value, key=key) for key, value in values.items()}})
    return state, groups


def export_dcp(
    checkpoint: str | Path, *, into: str | Path, torchtitan: bool = False, average: bool = False
) -> list[Path]:
    """Write the model and the optimizer's state of a checkpoint to the new DCP folder `into`; return its files.

    torch reads it into {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)} on any
    number of processes. Parameters have the dtype of their masters.

    | torchtitan   write the keys of torchtitan
    | average      write the averages that `Trainer.average` kept, in place of the parameters

    Raises FileExistsError if `into` is not empty, ValueError if the checkpoint has no average; DamageError, OSError."""
    checkpoint, into = Path(checkpoint), Path(into)
    if into.exists() and any(into.iterdir()):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(into))
    index = averaged(read_index(checkpoint)) if average else read_index(checkpoint)
    reader = CheckpointReader(index)
    slices: dict[int, StoredSlice] = {}
    model: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = defaultdict(dict)

    def read(meta: Tensor) -> Tensor:
        held = replace(one := slices[id(meta)], tensor=torch.empty(one.tensor.shape, dtype=one.tensor.dtype))
        reader.fill([held])
        return torch.view_as_complex(held.tensor) if meta.is_complex() else held.tensor

    for source, stored in index.tensors.items():
        slot, _, name = source.rpartition("/")
        kind, _, key = slot.partition("/")
        real = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        meta = torch.view_as_complex(real) if stored.shape and name in index.extra.get("complex", ()) else real
        slices[id(meta)] = StoredSlice.of_full(real, name=name, slot=slot)
        if slot in ("parameter", "buffer"):
            aliases = (alias for alias, first in index.aliases.items() if first == name)
            model |= dict.fromkeys((name, *aliases), meta)
        elif kind in OPTIMIZER_KINDS:
            state[name][key] = read(meta).item() if kind == "number" else meta
    groups = _groups(index)
    optimizer: dict[str, Any] = {"state": dict(state)} | ({} if torchtitan else {"param_groups": groups})
    for group in groups if torchtitan else ():
        options = {key: value for key, value in group.items() if key != "params"}
        optimizer |= {f"param_groups.{name}.{key}": options[key] for name in group["params"] for key in options}
    write_dcp(into, tree={**(model if torchtitan else {"model": model}), "optimizer": optimizer}, read=read)
    return sorted(into.iterdir())


def _groups(index: CheckpointIndex) -> list[dict[str, Any]]:
    """Return the groups of the optimizer as torch has them, equal ones as one; the implementation is torch's choice."""
    groups: list[dict[str, Any]] = []
    for group in index.extra.get("groups", []):
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in group["values"].items()}
        values |= {key: None if key in ("fused", "foreach") else False for key in IMPLEMENTATIONS & values.keys()}
        equal = next((known for known in groups if known == {**values, "params": known["params"]}), None)
        if equal is None:
            groups.append(equal := {**values, "params": []})
        equal["params"] += group["names"]
    return groups
