"""Errors of checkpoints and the damage that they report."""

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
        more = f" and {len(self.tensors) - _SHOWN} more" if len(self.tensors) > _SHOWN else ""
        shown = f" ({', '.join(self.tensors[:_SHOWN])}{more})" if self.tensors else ""
        return f"{self.file}{shown}: expected {self.expected}, found {self.found}"


_SHOWN = 3


class DamageError(RuntimeError):
    """A checkpoint is truncated, altered or not a checkpoint; see `damages`."""

    def __init__(self, damages: Sequence[Damage]) -> None:
        self.damages = tuple(damages)
        rest = f"\n  and {len(damages) - _SHOWN} more" if len(damages) > _SHOWN else ""
        super().__init__("damaged checkpoint:\n  " + "\n  ".join(map(str, self.damages[:_SHOWN])) + rest)

    def __reduce__(self) -> "tuple[type[DamageError], tuple[tuple[Damage, ...]]]":
        """Pickle the damages, from which the message is made again."""
        return DamageError, (self.damages,)


class SaveError(RuntimeError):
    """A checkpoint was not written; older ones are unchanged. The message says which ranks failed and why."""
