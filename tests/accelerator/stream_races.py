"""Find races between the streams of a simulated device: two uses of one memory that no wait puts in order.

Each stream counts its operations. Its vector clock has the count of every other stream up to which it has waited. It
waits by an event or `wait_stream`, or because the host had synchronized before it queued an operation. Two uses of the
same bytes race if one of them writes, the streams differ, and the later one's clock is behind the earlier use.
Host memory takes part: the host races with a copy to or from it that the host has not waited for.

Freed memory is used again in the order of the stream on which it was allocated. So freeing races with an operation of
another stream for which neither the host, nor this stream, nor one passed to `Streams.keep` has waited."""

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor, UntypedStorage

from meshwise.tensor.core.vocab_parallel import GlobalShapeTensor

Clock: TypeAlias = dict[str, int]
"""For each stream, by name, the number of its operations that are known to be over."""


class StreamRace(RuntimeError):
    """Error for two uses of one memory without a wait between them; its text names both, the tensor and the wait."""


@dataclass(frozen=True)
class _Use:
    """Last use of some bytes of a memory by a stream: the stream, the number of its operation, and its text."""

    stream: str
    count: int
    writes: bool
    text: str


@dataclass
class Memory:
    """Memory of one storage.

    | device    number of the simulated device; None for host memory
    | owner     stream on which device memory was allocated
    | pinned    True for host memory that a device copies asynchronously
    | label     dtype and size of its first tensor, and where it was allocated"""

    device: int | None
    owner: str = ""
    pinned: bool = False
    label: str = ""
    uses: dict[tuple[int, int, str, bool], _Use] = field(default_factory=dict)
    kept_for: set[str] = field(default_factory=set)
    storage: weakref.ref[UntypedStorage] | None = None


class RaceDetector:
    """Vector clocks of one rank's streams and host, the memories they use, and the races found so far."""

    def __init__(self, *, watches: bool = True) -> None:
        """`watches`: False reports nothing; then races only show in the values."""
        self._watches = watches
        self._memories: dict[int, Memory] = {}
        self._clocks: dict[str, Clock] = {}
        self.host: Clock = {}
        self._found: list[str] = []
        self._lock = threading.RLock()

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """Return the memory of a tensor; None for host memory that no stream has used."""
        own = tensor.local if isinstance(tensor, GlobalShapeTensor) else tensor
        return self._memories.get(own.untyped_storage()._cdata)

    def add(self, tensor: Tensor, *, memory: Memory) -> Memory:
        """Register the memory of a new tensor, or of one that a stream uses for the first time."""
        storage = tensor.untyped_storage()
        key = storage._cdata

        def freed(_: object) -> None:
            self._memories.pop(key, None)
            if (race := self.race_of_free(memory)) is not None:
                self._found.append(race)

        memory.storage = weakref.ref(storage, freed)
        self._memories[key] = memory
        return memory

    # ---- clocks ------------------------------------------------------------------------------------------------

    def clock(self, stream: str) -> Clock:
        """Return a copy of a stream's clock, including its own operations."""
        with self._lock:
            return dict(self._clocks.setdefault(stream, {}))

    def wait(self, stream: str, *, clock: Clock) -> None:
        """Let a stream know that all in `clock` is over."""
        with self._lock:
            _join(self._clocks.setdefault(stream, {}), clock)

    def host_waits(self, clock: Clock) -> None:
        """Let the host know that all in `clock` is over. Raises StreamRace."""
        self.check()
        self.know(clock)

    def know(self, clock: Clock) -> None:
        """Let the host know that all in `clock` is over."""
        with self._lock:
            _join(self.host, clock)

    # ---- uses --------------------------------------------------------------------------------------------------

    def use(self, stream: str, *, uses: Iterable[tuple[Tensor, bool]], text: str) -> None:
        """Record an operation of a stream with the tensors that it reads (False) and writes (True).

        Raises StreamRace."""
        self.check()
        with self._lock:
            clock = self._clocks.setdefault(stream, {})
            _join(clock, self.host)
            clock[stream] = count = clock.get(stream, 0) + 1
            for tensor, writes in uses:
                memory = self.memory_of(tensor) or self.add(tensor, memory=Memory(None, label=label(tensor)))
                low, high = _extent(tensor)
                now = _Use(stream, count, writes, text)
                self._compare(memory, now, clock, low, high, tensor)
                if writes:
                    covered = [key for key in memory.uses if low <= key[0] and key[1] <= high]
                    for key in covered:
                        del memory.uses[key]
                memory.uses[low, high, stream, writes] = now

    def made(self, stream: str, *, tensor: Tensor, text: str) -> None:
        """Record that the last operation of a stream has written a new tensor."""
        memory = self.memory_of(tensor)
        assert memory is not None
        memory.uses[(*_extent(tensor), stream, True)] = _Use(
            stream, self._clocks[stream][stream], writes=True, text=text
        )

    def host_uses(self, tensor: Tensor, *, writes: bool, text: str) -> None:
        """Check a use of host memory by the host. Raises StreamRace."""
        self.check()
        memory = self.memory_of(tensor)
        with self._lock:
            if memory is None or not memory.uses:
                return
            self._compare(memory, _Use("the host", 0, writes, text), self.host, *_extent(tensor), tensor)

    def race_of_free(self, memory: Memory) -> str | None:
        """Return the text of a race if this device memory may still be in use by a stream when it is freed."""
        if memory.device is None:
            return None
        clocks = [self.host, *(self._clocks.get(name, {}) for name in (memory.owner, *memory.kept_for))]
        for use in memory.uses.values():
            if use.stream != memory.owner and all(clock.get(use.stream, 0) < use.count for clock in clocks):
                return (
                    f"memory is freed while a stream may use it: {memory.label}\n  first:  {use.text}, on "
                    f"{use.stream}\n  then:   freed, to be used again on {memory.owner}\n  missing: a wait of "
                    f"{memory.owner} for {use.stream}, or `streams.keep(tensor, stream=…)` before it is freed"
                )
        return None

    def report(self, race: str) -> None:
        """Raise StreamRace, unless races are not watched."""
        if self._watches:
            raise StreamRace(race)

    def check(self) -> None:
        """Raise StreamRace for memory that was freed too early since the last call."""
        if self._found:
            found, self._found = self._found, []
            self.report(found[0])

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Let the next `check` raise a race that is found in the block, on a thread whose errors nobody sees."""
        try:
            yield
        except StreamRace as race:
            self._found.append(str(race))

    def _compare(self, memory: Memory, now: _Use, clock: Clock, low: int, high: int, tensor: Tensor) -> None:
        for (start, stop, stream, writes), before in memory.uses.items():
            if start < high and low < stop and (writes or now.writes) and clock.get(stream, 0) < before.count:
                after, first = "writes" if now.writes else "reads", "written" if writes else "read"
                self.report(
                    f"{now.stream} {after} memory that {stream} may not have {first} yet: {label(tensor)} of "
                    f"{memory.label}, bytes {low} to {high}\n  first:  {before.text}, on {stream}\n  then:   "
                    f"{now.text}, on {now.stream}\n  missing: a wait of {now.stream} for {stream} between them"
                )


def label(tensor: Tensor) -> str:
    """Return dtype and shape of a tensor as text."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _join(clock: Clock, other: Clock) -> None:
    for name, count in other.items():
        if clock.get(name, 0) < count:
            clock[name] = count


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last one."""
    size, low = tensor.element_size(), int(tensor.storage_offset())
    if not tensor.numel():
        return low * size, low * size
    last = low + sum((dim - 1) * stride for dim, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low * size, (last + 1) * size
