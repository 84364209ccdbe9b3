"""Recompute a block: keep its inputs, and compute everything else again in its backward.

In torch's `checkpoint` the recomputed values belong to one call of backward, and a zero-bubble pipeline has several.
Here a recomputed value belongs to the slot of its saved tensor, and lives as long as the slot:

    forward     every tensor that autograd saves becomes an empty slot
    backward    the first slot that autograd reads repeats the whole forward, which fills all slots in order and stops
                after the last slot
                a node of the graph that has run frees its slots, as it would free saved tensors

A separate node saves the block's inputs, so that they can be offloaded like other saved activations. The repeated
forward finds the state of the first forward: torch's generators, autocast, and the state that `ForwardReplay`
remembers. Only the module's `forward` is repeated, so hooks on the block itself do not run again. During
the repetition, norms update copies of their running statistics, because the first forward has updated the real ones.
A block that writes to another buffer is refused, because its repeated forward might read the changed buffer. Lists,
dicts and objects that a block receives have their earlier content meanwhile (`InputContainers`); tensors do not."""

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwise.base.batch_norm_classes import RunningNorm
from meshwise.base.tensor_tree import map_tensors, reachable, storage_bytes
from meshwise.comm.api.streams import cuda_in_use, generator_states, restore_generators
from meshwise.memory.recompute_costs import DeviceTimer, RecomputeCost, SavedOperations, saved_bytes_hook
from meshwise.model.forward import ForwardReplay, ReplayTape
from meshwise.precision.dtype_policy import active_product_casts


class RecomputeError(RuntimeError):
    """The repeated forward of a block differs from its first forward, or cannot run."""


class RecomputedBlock:
    """Replacement of a module's `forward` that can recompute the module's activations in the backward.

    | mode         what is kept: all saved tensors (`none`), inputs (`full`), or inputs and slow results (`selective`)
    | recall       the state to restore and the kept results to replay when the forward is repeated
    | cost         measured cost of every mode; None before the first measurement
    | measures     measure `cost` in every forward with gradients, and recompute everything meanwhile"""

    def __init__(self, module: nn.Module, *, name: str, mode: str, recall: ForwardReplay) -> None:
        self.name = name
        self.mode = mode
        self.recall = recall
        self.cost: RecomputeCost | None = None
        self.measures = False
        self.run = module.forward
        self._module = module
        self._own = "forward" in vars(module)
        parts = list(module.named_modules())
        self._norms = [part for _, part in parts if isinstance(part, RunningNorm)]
        self._buffered = [(f"{path}." if path else "", one) for path, one in parts if one not in self._norms]
        self.__wrapped__ = self.run
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward. With gradients enabled and a mode other than `none`, prepare its repetition."""
        if self.mode == "none" or not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        if self.measures:
            return self._measured(args, kwargs)
        call = _Call(self, args, kwargs)
        with self._watched(), saved_tensors_hooks(call.pack, call.unpack), call.first():
            return self.run(*args, **kwargs)

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Let norms use copies of their running statistics inside the block."""
        own = [(norm, name, buffer) for norm in self._norms for name, buffer in norm.named_buffers(recurse=False)]
        try:
            for norm, name, buffer in own:
                setattr(norm, name, buffer.clone())
            yield
        finally:
            for norm, name, buffer in own:
                setattr(norm, name, buffer)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Check the first forward, which runs in this context. Raises RecomputeError if it writes to a buffer."""
        before = self._buffers()
        try:
            yield
        finally:  # a pipeline stage that ends inside the block leaves the block's forward by an exception
            if written := [name for name, state in self._buffers().items() if before.get(name) != state]:
                raise RecomputeError(
                    f"{self.name} writes to its buffer {written[0]!r} in its forward; a repeated forward would write "
                    "again. Leave the module out: Options(recomputed=(…)) names the modules to recompute"
                )

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """Return the identity and the version (number of writes) of each buffer, without the buffers of norms."""
        return {
            prefix + name: (id(buffer), buffer._version)
            for prefix, part in self._buffered
            if part._buffers
            for name, buffer in part.named_buffers(recurse=False)
        }

    def _measured(self, args: Any, kwargs: Any) -> Any:
        """Run the forward under `full`, and measure the cost of every mode."""
        device = next((parameter.device for parameter in self._module.parameters()), torch.device("cpu"))
        whole, products = DeviceTimer(device), DeviceTimer(device)
        call, saved = _Call(self, args, kwargs), dict[int, int]()
        count = saved_bytes_hook(saved, parameters=self._module.parameters())

        def pack(tensor: Tensor) -> _Slot:
            count(tensor)
            return call.pack(tensor)

        try:
            with self._watched(), saved_tensors_hooks(pack, call.unpack), whole, call.first(clock=products):
                return self.run(*args, **kwargs)
        finally:
            inputs, kept = call.bytes()
            sizes = {"none": max(sum(saved.values()), inputs), "selective": inputs + kept, "full": inputs}
            times = {"none": 0.0, "selective": whole.seconds() - products.seconds(), "full": whole.seconds()}
            cost = RecomputeCost(sizes, times)
            self.cost = cost if self.cost is None else self.cost.merged(cost)
            call.forget()

    def close(self) -> None:
        """Restore the module's own forward."""
        if self._own:
            self._module.forward = self.run
        else:
            del self._module.forward


@dataclass
class _Slot:
    """Saved tensor: its kind (shape, dtype and device), and its recomputed value (or None)."""

    call: "_Call"
    kind: tuple[torch.Size, torch.dtype, torch.device]
    value: Tensor | None = None


class _Call:
    """One call of a block: its first forward, and the repetition in its backward."""

    def __init__(self, block: RecomputedBlock, args: Any, kwargs: Any) -> None:
        self._block = block
        self._selective = block.mode == "selective"
        self._tape = ReplayTape()
        self._needed = 0
        self._slots: list[weakref.ref[_Slot]] = []
        self._state = block.recall.snapshot()
        self._torch_state = _torch_state()
        self._inputs = _Inputs(args, kwargs, block=block.name)
        self._containers = InputContainers(args, kwargs)

    # ---- the first forward -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def first(self, *, clock: DeviceTimer | None = None) -> Iterator[None]:
        """Run the first forward in this context. Keep slow results under `selective`, and whenever `clock` is given.

        `clock` times the operations whose results are kept. Results after the last saved tensor are dropped."""
        recall = self._block.recall
        keeps = self._selective or clock is not None
        try:
            kept = SavedOperations(recall, clock=clock) if keeps else contextlib.nullcontext()
            with recall.using(self._tape if keeps else None), kept:
                yield
        finally:
            del self._tape.results[self._needed :]
            self._containers.drop_unchanged()

    def bytes(self) -> tuple[int, int]:
        """Return the bytes of the block's inputs, and the bytes of the kept results."""
        return storage_bytes(self._inputs.saved()), storage_bytes(self._tape.results)

    def forget(self) -> None:
        self._tape = ReplayTape()

    def pack(self, tensor: Tensor) -> _Slot:
        """Return the empty slot that autograd keeps in place of a saved tensor."""
        slot = _Slot(self, (tensor.shape, tensor.dtype, tensor.device))
        self._slots.append(weakref.ref(slot))
        self._needed = len(self._tape.results)
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        """Return the recomputed tensor of a slot; the first call repeats the forward."""
        if slot.value is None:
            self._repeat()
        if slot.value is None:
            raise RecomputeError(self._differs("fewer tensors"))
        return slot.value

    # ---- the repeated forward ----------------------------------------------------------------------------------

    def _repeat(self) -> None:
        args, kwargs = self._inputs.leaves()
        recall = self._block.recall
        fill = functools.partial(self._fill, deque(self._slots))
        play = recall.using(self._tape if self._selective else None, repeated=True)
        kept = SavedOperations(recall) if self._selective else contextlib.nullcontext()
        restored = (self._block.repeated(), self._containers.as_before(), kept)
        with contextlib.ExitStack() as stack:
            for context in (torch.enable_grad(), self._torch_state(), recall.restored(self._state), play, *restored):
                stack.enter_context(context)
            with saved_tensors_hooks(fill, lambda tensor: tensor), contextlib.suppress(_Enough):
                self._block.run(*args, **kwargs)
        self._tape = ReplayTape()

    def _fill(self, left: deque[weakref.ref[_Slot]], tensor: Tensor) -> Tensor:
        """Put a saved tensor into the first slot in `left`. Raises `_Enough` after the last slot.

        Raises RecomputeError if the tensor differs from the tensor of the first forward."""
        if not left:
            raise RecomputeError(self._differs("more tensors"))
        slot, kept = left.popleft()(), tensor.detach()
        if slot is not None:
            if slot.kind != (kind := (tensor.shape, tensor.dtype, tensor.device)):
                raise RecomputeError(self._differs(f"a tensor of {kind} instead of {slot.kind}"))
            slot.value = kept
        if not left:
            raise _Enough
        return kept

    def _differs(self, what: str) -> str:
        return (
            f"{self._block.name} saved {what} when its forward was repeated. It must compute the same twice: with no "
            "cache (set use_cache=False in the model's config) and no branch that may change. Change it, or name other "
            "modules to recompute: Options(recomputed=(…))"
        )


class _Enough(Exception):
    """Raised when all slots are filled. It is an Exception, so that torch runs `always_call` hooks on the way out."""


class _Inputs:
    """Arguments of a block, whose tensors a separate autograd node saves."""

    def __init__(self, args: Any, kwargs: Any, *, block: str) -> None:
        self._block = block
        given: list[Tensor] = []
        self._places: list[int] = []  # a tensor passed twice stays one object: torch's attention compares by `is`
        hole = torch.empty(0)

        def taken(tensor: Tensor) -> Tensor:
            place = next((place for place, one in enumerate(given) if one is tensor), len(given))
            self._places.append(place)
            given.extend([tensor] * (place == len(given)))
            return hole

        self._tree = map_tensors(taken, args), map_tensors(taken, kwargs)
        self._requires_grad = [tensor.requires_grad for tensor in given]
        self._result: Any = _Save.apply(torch.empty(0, requires_grad=True), *given)  # keeps its node alive

    def saved(self) -> tuple[Tensor, ...]:
        """Return the tensors among the arguments. Raises RecomputeError if one has been written to in place."""
        try:
            saved: tuple[Tensor, ...] = self._result.grad_fn.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise RecomputeError(
                f"an input of {self._block} has been written to in place since its forward, so the forward cannot be "
                "repeated. Write to a new tensor, or name other modules to recompute: Options(recomputed=(…))"
            ) from error
        return saved

    def leaves(self) -> tuple[Any, Any]:
        """Return the positional and keyword arguments, with their tensors as leaves of a new autograd graph."""
        saved = zip(self.saved(), self._requires_grad, strict=True)
        found = [tensor.detach().requires_grad_(needs) for tensor, needs in saved]
        leaves = iter([found[place] for place in self._places])
        args, kwargs = self._tree
        return map_tensors(lambda _: next(leaves), args), map_tensors(lambda _: next(leaves), kwargs)


class _Save(torch.autograd.Function):
    """Autograd function whose node saves tensors. Its result is not used, and it has no backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        return anchor.clone()


def _torch_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a function that returns a context with torch's casts, default device and generators as they are now."""
    devices = ["cpu", "cuda"] if cuda_in_use() else ["cpu"]
    casts = [(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in devices]
    cached = torch.is_autocast_cache_enabled()
    device_now = torch.get_default_device()
    states, products = generator_states(), active_product_casts()

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled in casts:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached))
            stack.enter_context(products)
            if torch.get_default_device() != device_now:
                stack.enter_context(device_now)
            stack.callback(restore_generators, generator_states())
            restore_generators(states)
            yield

    return restored


Container: TypeAlias = dict[Any, Any] | list[Any]
"""A list, a dict, or the attributes of an object (its `__dict__`)."""


class InputContainers:
    """The containers that can be reached from a block's arguments, with copies of their content before its forward."""

    def __init__(self, *arguments: Any) -> None:
        self._before = [(one, _copied(one)) for one in reachable(arguments) if isinstance(one, dict | list)]

    def drop_unchanged(self) -> None:
        """Drop the copies of containers that the first forward left unchanged; call it after that forward."""
        self._before = [(one, before) for one, before in self._before if _contents(one) != _contents(before)]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Restore the content from before the first forward, until the context ends; then the present content."""
        now = [(one, _copied(one)) for one, _ in self._before]
        try:
            _put(self._before)
            yield
        finally:
            _put(now)


def _copied(container: Container) -> Container:
    """Return a shallow copy of a container. It avoids the `copy` method of the container's class, which may do more."""
    return dict(container) if isinstance(container, dict) else list(container)


def _contents(container: Container) -> list[int]:
    return [id(one) for one in ([*container, *container.values()] if isinstance(container, dict) else container)]


def _put(contents: list[tuple[Container, Container]]) -> None:
    for container, content in contents:
        container.clear()
        if isinstance(container, dict):
            container.update(content)
        else:
            container.extend(content)
