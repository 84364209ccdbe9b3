"""List torch's backends for joining ranks, by name and version."""

from __future__ import annotations

import torch
import torch.distributed as dist


def backends() -> dict[str, str]:
    """`gloo` and `nccl`, each with its version, `yes` or `no`."""
    nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "gloo": "yes" if dist.is_available() and dist.is_gloo_available() else "no",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl and torch.cuda.is_available() else "no",
    }
