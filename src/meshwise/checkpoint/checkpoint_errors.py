"""Errors of checkpoints and the damage that they report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Damage:
    """One damaged place: its file, its tensors, the expected and the found value."""

    file: str
    expected: str
    found: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(self.tensors[:_SHOWN]) + (f" and {len(self.tensors) - _SHOWN} more" * self._more)
        return f"{self.file}{f' ({shown})' if shown else ''}: expected {self.expected}, found {self.found}"

    @property
    def _more(self) -> bool:
        return len(self.tensors) > _SHOWN


_SHOWN = 3


class DamageError(RuntimeError):
    """A checkpoint that is torn, altered or not a checkpoint; `damages` says what is wrong with it."""

    def __init__(self, damages: Sequence[Damage]) -> None:
        self.damages = tuple(damages)
        rest = f"\n  and {len(damages) - _SHOWN} more" if len(damages) > _SHOWN else ""
        super().__init__("damaged checkpoint:\n  " + "\n  ".join(map(str, self.damages[:_SHOWN])) + rest)

    def __reduce__(self) -> tuple[type[DamageError], tuple[tuple[Damage, ...]]]:
        """Made anew from the damages: an exception is else made from its message, whose letters are not damages."""
        return DamageError, (self.damages,)


class SaveError(RuntimeError):
    """A checkpoint was not written; what there was before is as it was. The message says which ranks failed and why."""
