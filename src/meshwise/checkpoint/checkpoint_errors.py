"""Errors of checkpoints (`DamageError`, `SaveError`), and one place of damage (`Damage`)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Damage:
    """A damaged place: the path of its file, the names of its tensors, and the expected and found content, in words."""

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
    """Error for a folder that is a damaged checkpoint or none; `damages` lists all damaged places."""

    def __init__(self, damages: Sequence[Damage]) -> None:
        self.damages = tuple(damages)
        rest = f"\n  and {len(damages) - _SHOWN} more" if len(damages) > _SHOWN else ""
        super().__init__("damaged checkpoint:\n  " + "\n  ".join(map(str, self.damages[:_SHOWN])) + rest)

    def __reduce__(self) -> "tuple[type[DamageError], tuple[tuple[Damage, ...]]]":
        """Pickle only the damages: the message is made again from them."""
        return DamageError, (self.damages,)


class SaveError(RuntimeError):
    """Error for a checkpoint that was not written; the message says which ranks failed, and why. Older ones stay."""
