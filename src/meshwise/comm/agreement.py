"""Whether the ranks of a group are about to call the same: their stamps, swapped before anything moves."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import torch
from torch import Tensor

from meshwise.comm.journal import Journal, RanksDisagree, Stamp, disagreement

_BYTES = 4096
_SITE = 1000


def as_tensor(stamp: Stamp) -> Tensor:
    """A stamp as bytes, as many for any stamp."""
    text = pickle.dumps(stamp._replace(site=stamp.site[-_SITE:]))
    return torch.frombuffer(bytearray(text.ljust(_BYTES, b"\0")), dtype=torch.uint8)


def require_alike(found: Mapping[int, Tensor], *, journal: Journal) -> None:
    """Raise RanksDisagree, with a table of who called what, unless these stamps, in group order by rank, are alike.

    They are those of the last call in the journal, which then does not count.
    """
    stamps = {rank: pickle.loads(bytes(row.tolist())) for rank, row in found.items()}
    if table := disagreement(stamps):
        journal.refused(tuple(sorted(stamps)))
        raise RanksDisagree(f"the ranks disagree about what to do together:\n{table}")
