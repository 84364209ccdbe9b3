"""Count the collectives of a block of code, and the bytes that autograd saves in it, to compare with formulas.

    with world.record() as records:
        trainer.step(batch)
    count(records).check({"reduce_scatter[dp]": (2, 8 * psi), "all_gather[dp]": (2, 8 * psi), …})

The name of a row is the kind and the axes, as a call record prints: `kind[axis·axis]`. Its value is (calls, bytes). The
bytes are the payload of the whole collective as one rank sees it.

    with SavedForBackward(model) as saved:
        model(batch)
    assert saved.bytes == layers * bytes_per_layer

Peak memory of a process mixes activations with parameters, buffers and the allocator's cache. The saved bytes are exact
and equal on every machine."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwise.base.text_format import align_columns
from meshwise.comm.api.flight_recorder import CallRecord


class Counts(dict[str, tuple[int, int]]):
    """Collectives of one rank: (calls, bytes) by `kind[axes]`. Prints as a table."""

    def __repr__(self) -> str:
        rows = [(name, f"{calls:,}", f"{size:,}") for name, (calls, size) in self.items()]
        return align_columns([("", "calls", "bytes"), *rows])

    def check(self, expected: Mapping[str, tuple[int, int]]) -> None:
        """Raise AssertionError, with both tables side by side, unless the rows equal `expected`."""
        if self == expected:
            return
        lines = [("", "calls", "expected", "bytes", "expected", "")]
        for name in sorted({*self, *expected}):
            here, there = self.get(name, (0, 0)), expected.get(name, (0, 0))
            mark = "" if here == there else "←"
            lines.append((name, f"{here[0]:,}", f"{there[0]:,}", f"{here[1]:,}", f"{there[1]:,}", mark))
        raise AssertionError(f"the collectives are not the expected ones\n{align_columns(lines)}")


def count(records: Iterable[CallRecord]) -> Counts:
    """Return the calls and bytes of one rank's recorded collectives, by kind and axes in alphabetical order."""
    rows: dict[str, tuple[int, int]] = {}
    for record in records:
        name = f"{record.kind}[{'·'.join(record.axes)}]"
        calls, size = rows.get(name, (0, 0))
        rows[name] = (calls + 1, size + record.bytes)
    return Counts(sorted(rows.items()))


class SavedForBackward(saved_tensors_hooks):
    """Context manager that measures the bytes that autograd saves inside it, without the parameters of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._kept: dict[int, Tensor] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        """Bytes saved so far: the sum of the sizes of all storages, each counted once."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())

    def __enter__(self) -> "SavedForBackward":  # type: ignore[override]
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._parameters:
            self._kept.setdefault(place, tensor)
        return tensor
