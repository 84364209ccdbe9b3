"""Compare what the ranks did in a step, and name the difference and its remedy.

Every step ends with one all-reduce, which also shows whether all ranks made the same calls and received the same batch.
Only when they were not do they tell each other what they had.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.base import tensor_tree as tree
from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import CallRecord, disagreement, ranks_text

_LOOKED_AT = 64 << 10
"""Bytes at the beginning and at the end of a tensor by which its contents are told."""


@dataclass(frozen=True)
class StepInputs:
    """Calls and batch of a rank in a step."""

    batch: int
    rows: int
    called: tuple[CallRecord, ...]


def batch_digest(batch: Any, *, contents: bool) -> int:
    """32 bits that tell batches apart: by the shapes and dtypes of their tensors and, if asked, by what is in them.

    To look at what is in them waits for the device, and tensors without values have nothing.
    """
    digest = 0
    for tensor in tree.tensors(batch):
        digest = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest)
        if contents and not tensor.is_meta and tensor.layout == torch.strided:
            digest = zlib.crc32(bytes(_ends(tensor.detach()).tolist()), digest)
    return digest


def _ends(tensor: Tensor) -> Tensor:
    """Return the bytes at both ends of a tensor."""
    most = _LOOKED_AT // tensor.element_size()
    flat = tensor.reshape(-1)
    ends = flat if flat.numel() <= 2 * most else torch.cat([flat[:most], flat[-most:]])
    return ends.contiguous().cpu().view(torch.uint8)


def mismatch_text(mesh: Mesh, *, found: Mapping[int, StepInputs]) -> str:
    """Return a message: what differs between the ranks in a step, and what to change."""
    parties: dict[tuple[int, int], list[int]] = {}
    for rank, given in sorted(found.items()):
        parties.setdefault((given.batch, given.rows), []).append(rank)
    if len(parties) == 1:
        return _first_disagreement(mesh, {rank: given.called for rank, given in found.items()})
    had = ", ".join(f"{ranks_text(ranks)} one of {rows} rows" for (_, rows), ranks in parties.items())
    return (
        f"the ranks were given different batches ({had}). step(batch) takes the global batch, the same on every rank, "
        "and gives each rank its own rows; a batch that is this rank's part already, as a DistributedSampler makes it, "
        "goes to step(batch, local=True)"
    )


def _first_disagreement(mesh: Mesh, called: Mapping[int, Sequence[CallRecord]]) -> str:
    meetings = dict.fromkeys(stamp.axes for stamps in called.values() for stamp in stamps if not stamp.point_to_point)
    for axes, ranks in [(met, ranks) for met in meetings for ranks in mesh.groups(met)]:
        calls = {rank: [stamp for stamp in called[rank] if stamp.axes == axes] for rank in ranks}
        for number in range(max(len(stamps) for stamps in calls.values())):
            present = {rank: stamps[number] for rank, stamps in calls.items() if number < len(stamps)}
            missing = sorted(set(calls) - set(present))
            if (table := disagreement(present)) or missing:
                less = "" if not missing else f"\n  ranks {missing} called no more than {number} of them in this step"
                return f"the ranks called different collectives in this step:\n{table or ''}{less}"
    return "the ranks called different collectives before this step"
