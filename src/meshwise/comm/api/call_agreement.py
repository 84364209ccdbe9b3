"""Check that the ranks of a group are about to make the same call: they exchange records before anything moves.

And whether they have called the same to the end: what no rank needed of another (two sources of one broadcast) fails in
no call.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from meshwise.comm.api.flight_recorder import (
    CallLine,
    CallRecord,
    FlightRecorder,
    PlacedCall,
    RanksDisagree,
    disagreement,
    parted,
    ranks_text,
)

_BYTES = 4096
_SITE = 1000


def as_tensor(stamp: CallRecord) -> Tensor:
    """Return a stamp as bytes, as many for any stamp."""
    text = pickle.dumps(stamp._replace(site=stamp.site[-_SITE:]))
    return torch.frombuffer(bytearray(text.ljust(_BYTES, b"\0")), dtype=torch.uint8)


def require_alike(found: Mapping[int, Tensor], *, journal: FlightRecorder) -> None:
    """Raise RanksDisagree, with a table of the calls, unless these records (in group order by rank) are equal.

    They are the records of the last call in the flight recorder, which then does not count.
    """
    stamps = {rank: pickle.loads(bytes(row.tolist())) for rank, row in found.items()}
    if table := disagreement(stamps):
        journal.refused(tuple(sorted(stamps)))
        raise RanksDisagree(f"the ranks disagree about what to do together:\n{table}")


def require_same(found: Mapping[int, tuple[Sequence[PlacedCall], Mapping[CallLine, int]]]) -> NoReturn:
    """Raise RanksDisagree with what differs first. `found`: of each rank its last calls, and how many on each line."""
    if apart := parted({rank: recent for rank, (recent, _) in found.items()}):
        raise RanksDisagree(apart[0])
    for line in {line: None for _, counts in found.values() for line in counts if not line.point_to_point}:
        counts = {rank: found[rank][1].get(line, 0) for rank in line.ranks}
        most = max(counts, key=counts.__getitem__)
        if counts[most] != min(counts.values()):
            last = next((str(call.stamp) for call in reversed(found[most][0]) if call.line == line), "long ago")
            told = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
            raise RanksDisagree(
                f"{ranks_text(line.ranks)} have made different numbers of calls together: {told}; the last of rank "
                f"{most} is {last}"
            )
    raise RanksDisagree("the ranks of a group have called different collectives, longer ago than calls are kept")
