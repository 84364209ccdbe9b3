"""Exceptions for the loss of another rank: its process ended, or the connection to it broke."""

import re


class RankLostError(RuntimeError):
    """Raised when another rank ended, or its connection broke."""


class RankKilledError(RankLostError):
    """Raised by the launcher when SIGKILL ended a rank: sent by a user, or by the system when memory ran out."""


def lost(peer: int, *, about: object, error: Exception) -> RankLostError:
    """Return the exception for a call that failed because rank `peer` was lost. about: the call, printed in the
    message. error: the cause; torch's prefix and advice are cut off its message."""
    what = re.sub(r"^\[.*?\] | This is typically.*$", "", str(error), flags=re.DOTALL)
    return RankLostError(f"rank {peer} was lost in {about} ({what.rstrip('.')})")
