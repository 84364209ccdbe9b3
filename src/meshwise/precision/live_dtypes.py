"""The record as the tensors of a rank show it, beside the one that was asked for."""

from collections.abc import Iterable, Mapping

import torch

KINDS = ("parameters", "compute", "reduction", "accumulation", "master", "optimizer_state", "buffers")


NOTHING = "none"
"""In place of a dtype, where a rank has nothing of a kind."""


def live(found: Mapping[str, Iterable[torch.dtype]]) -> dict[str, str]:
    """Return the dtypes of every kind by name, or NOTHING."""
    names = {kind: sorted({str(dtype).removeprefix("torch.") for dtype in found.get(kind, ())}) for kind in KINDS}
    return {kind: " ".join(dtypes) or NOTHING for kind, dtypes in names.items()}
