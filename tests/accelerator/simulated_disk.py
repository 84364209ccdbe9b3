"""Let the race detector see the swap file and pools of staging buffers, in code of ranks on simulated devices.

    | read, write    an operation of the stream "the disk" with the host memory; `SwapTransfer` is what waits for it
    | `give`         a use of the buffer by the host, which must have waited for all copies; then the buffer is NaN

Import this module before a `SwapFile` is made."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from accelerator.queued_work import place_of_call
from accelerator.simulated_device import of_this_thread
from accelerator.simulated_streams import SimulatedStreams, hidden, poison
from accelerator.stream_races import Clock
from meshwise.memory.swap_file import BufferPool, SwapFile, SwapTransfer

_DISK = "the disk"
_files = weakref.WeakKeyDictionary[SwapFile, SimulatedStreams]()
_moved = weakref.WeakKeyDictionary[Future[None], tuple[SimulatedStreams, Clock]]()
_make, _move, _give = SwapFile.__init__, SwapFile._move, BufferPool.give
_wait, _then = SwapTransfer.wait, SwapTransfer.then


def _made(self: SwapFile, *args: Any, **more: Any) -> None:
    _make(self, *args, **more)
    if (streams := of_this_thread()) is not None:
        _files[self] = streams


def _moves(self: SwapFile, kind: str, call: Callable[..., int], *rest: Any) -> SwapTransfer:
    offset, memory, after = rest if rest[2:] else (*rest, lambda: None)
    streams = _files.get(self)
    if streams is None:
        return _move(self, kind, call, *rest)
    text, clock = f"{kind} of the swap file at {place_of_call()}", dict[str, int]()

    def use() -> None:
        streams.races.use(_DISK, uses=[(memory, kind == "read")], text=text)
        clock.update(streams.races.clock(_DISK))

    def begin() -> None:
        after()
        with streams.races.reported():
            use()

    if kind == "read":
        use()
    transfer = _move(self, kind, call, offset, memory, after if kind == "read" else begin)
    _moved.update((future, (streams, clock)) for future in transfer._futures)
    return transfer


def _know_end(transfer: SwapTransfer) -> None:
    """Let the host know that the transfer is over."""
    for future in transfer._futures:
        if future in _moved:
            streams, clock = _moved[future]
            streams.races.know(clock)


def _waits(self: SwapTransfer) -> None:
    _wait(self)
    _know_end(self)


def _calls(self: SwapTransfer, call: Callable[[], None]) -> None:
    def after_end() -> None:
        _know_end(self)
        call()

    _then(self, after_end)


def _gives(self: BufferPool, buffer: Tensor) -> None:
    if isinstance(self.streams, SimulatedStreams):
        with self.streams.races.reported():
            self.streams.races.host_uses(buffer, writes=True, text=f"given back to a pool at {place_of_call()}")
        with hidden():
            poison(buffer)
    _give(self, buffer)


for _class, _name, _method in (
    (SwapFile, "__init__", _made),
    (SwapFile, "_move", _moves),
    (SwapTransfer, "wait", _waits),
    (SwapTransfer, "then", _calls),
    (BufferPool, "give", _gives),
):
    setattr(_class, _name, _method)
