"""List torch's backends for joining ranks, by name and version."""

from __future__ import annotations

import torch.distributed as dist

from meshwise.comm.api.streams import gpu_count, nccl_version


def backends() -> dict[str, str]:
    """`gloo` and `nccl`, each with its version, `yes` or `no`."""
    nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "gloo": "yes" if dist.is_available() and dist.is_gloo_available() else "no",
        "nccl": nccl_version() if nccl and gpu_count() else "no",
    }
