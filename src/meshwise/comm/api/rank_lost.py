"""Errors of a rank whose collective failed because another rank ended."""

import re


class RankLostError(RuntimeError):
    """Another rank ended, or its connection broke, while this one was in a collective."""


class RankKilledError(RankLostError):
    """A rank was ended by SIGKILL: by a user, or by the system when memory ran out."""


def lost(peer: int, *, about: object, error: Exception) -> RankLostError:
    """Return the error of a call that failed because of what became of `peer`."""
    what = re.sub(r"^\[.*?\] | This is typically.*$", "", str(error), flags=re.DOTALL)
    return RankLostError(f"rank {peer} was lost in {about} ({what.rstrip('.')})")
