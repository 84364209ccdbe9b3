"""A module that lives on one rank and is called from others, with its backward across processes (`remote`).

The rank that has the module serves: it waits for messages of its callers and answers each. A message is a header
(a small Python value) and its tensors:

    | message     the owner                                            the answer
    | FORWARD     runs the module, and keeps inputs and outputs        outputs
    | BACKWARD    runs the backward of a kept call                     gradients of the inputs that need one
    | STEP        when all callers have sent one: optimizer step,      none, after the update
    |             gradients to zero, kept calls dropped
    | CLOSE       serves until all callers have sent one               none

A caller gets answers in the order of its messages. A call is two autograd functions, one that sends and one that
receives. So two calls that begin before the first `wait` run at the same time, and so do their backwards."""

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.autograd.function import once_differentiable

from meshwise.base.tensor_tree import tensors
from meshwise.comm.api.world import Work, World, wait_all


class _Kind(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    STEP = 2
    CLOSE = 3


class _Header(NamedTuple):
    """Header of a message or an answer. `error`: why an answer has no tensors."""

    kind: _Kind
    call: int = 0
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    needs: tuple[bool, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()
    grad: bool = False
    error: str = ""


class RemoteCall:
    """A call of a remote module in progress. `wait` returns the results; the fields are internal."""

    def __init__(self, module: "RemoteModule", *, number: int) -> None:
        self.module, self.number = module, number
        self.works: list[Work] = []
        self.answer: tuple[_Header, list[Tensor]] | None = None
        self.token: Tensor | None = None

    def wait(self) -> Any:
        """Wait for the results, and return them: a tensor or a tuple of tensors. Call it once.

        Raises RuntimeError with the text of the module's error, if it raised one."""
        if self.token is None:
            raise RuntimeError("this call of a remote module has returned its results; call wait() once, and keep them")
        results = _Receive.apply(self.token, self)
        self.token = self.answer = None  # they lead back to this call
        return results[0] if len(results) == 1 else results


class _Send(torch.autograd.Function):
    """Send the inputs of a call, and return an empty tensor that leads to `_Receive`. Backward: return gradients.

    `anchor` is an empty tensor that needs a gradient: the backward also runs where no input needs one."""

    @staticmethod
    def forward(ctx: Any, call: RemoteCall, header: _Header, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.call, ctx.needs = call, header.needs
        call.module._send(call, header, inputs)
        return anchor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        gradients = iter(ctx.call.module._take(ctx.call))
        return None, None, None, *(next(gradients) if needs else None for needs in ctx.needs)


class _Receive(torch.autograd.Function):
    """Receive the outputs of a call. Backward: send their gradients."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, call: RemoteCall) -> tuple[Tensor, ...]:
        ctx.call, ctx.token = call, token
        outputs = tuple(call.module._take(call))
        ctx.mark_non_differentiable(*(x for x in outputs if not (x.is_floating_point() or x.is_complex())))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.call.module._send(ctx.call, _Header(_Kind.BACKWARD), gradients)
        return torch.zeros_like(ctx.token), None


class RemoteModule:
    """This rank's side of a module that lives on rank `rank`; made by `remote`.

    | here     True on the rank that has the module
    | module   the module, on that rank"""

    def __init__(self, world: World, *, rank: int, callers: Sequence[int]) -> None:
        if not 0 <= rank < world.size:
            raise ValueError(f"rank={rank}: this world has ranks 0 to {world.size - 1}")
        if rank in callers or not callers or not all(0 <= each < world.size for each in callers):
            raise ValueError(f"callers={list(callers)}: name other ranks than {rank}, from 0 to {world.size - 1}")
        self._world, self._rank, self._callers = world, rank, tuple(callers)
        [self._axis] = world.mesh.names
        self.here = world.rank == rank
        self.module: nn.Module = nn.Identity()
        self.optimizer: optim.Optimizer | None = None
        self._kept: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._number, self._closed = 0, False
        self._unanswered: deque[RemoteCall] = deque()
        self._replies: dict[int, list[Work]] = {}

    # ---- a caller --------------------------------------------------------------------------------------------------

    def __call__(self, *inputs: Tensor, **keywords: Any) -> Any:
        """Run the module on its rank: `begin(…).wait()`."""
        return self.begin(*inputs, **keywords).wait()

    def begin(self, *inputs: Tensor, **keywords: Any) -> RemoteCall:
        """Send the inputs, and return the call in progress. `keywords`: small values, and tensors without gradients.

        Inputs must not change before `wait`. Raises TypeError for an input that is no tensor, and ValueError for a
        keyword that needs a gradient."""
        if others := [type(x).__name__ for x in inputs if not isinstance(x, Tensor)]:
            raise TypeError(f"inputs of a remote module are tensors, not {others[0]}; use a keyword: module(x, n=3)")
        grad, call = torch.is_grad_enabled(), self._new_call()
        if grad and any(x.requires_grad for x in tensors(keywords)):
            raise ValueError(f"keywords get no gradient, and one of {list(keywords)} needs one; give it by position")
        needs = tuple(grad and x.requires_grad for x in inputs)
        header = _Header(_Kind.FORWARD, needs=needs, keywords=tuple(keywords.items()), grad=grad)
        call.token = _Send.apply(call, header, torch.zeros(0, requires_grad=grad), *inputs)
        return call

    def step(self) -> None:
        """Update the module with the sum of the gradients of all callers. Every caller calls it; returns after the
        update. Raises RuntimeError if the module has no optimizer."""
        self._ask(_Kind.STEP)

    def close(self) -> None:
        """End this rank's calls; a second call does nothing. `serve` returns when every caller has called `close`."""
        if not self._closed:
            self._ask(_Kind.CLOSE)
        self._closed = True

    def _new_call(self) -> RemoteCall:
        if self.here or self._world.rank not in self._callers:
            owner = f"rank {self._rank} has the module and serves; its callers are ranks {list(self._callers)}"
            raise RuntimeError(f"rank {self._world.rank} cannot call a remote module: {owner}")
        self._number += 1
        return RemoteCall(self, number=self._number)

    def _ask(self, kind: _Kind) -> None:
        call = self._new_call()
        self._send(call, _Header(kind))
        self._take(call)

    def _send(self, call: RemoteCall, header: _Header, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message about a call to the owner, without waiting for its arrival."""
        if self._closed:  # nobody would answer
            raise RuntimeError(f"rank {self._world.rank} has called close() of this remote module; call close() last")
        pickle.dumps(header.keywords)  # raises here, before the owner waits for a message
        # `recv_any` tells messages apart by size and dtype alone, so a message of a rare kind announces the header.
        bell = torch.zeros(3, dtype=torch.uint16, device=self._world.device)
        call.works = [self._world.send(bell, axis=self._axis, to=self._rank)]
        call.works += self._sent(header._replace(call=call.number), tensors, to=self._rank)
        call.answer = None
        self._unanswered.append(call)

    def _take(self, call: RemoteCall) -> list[Tensor]:
        """Return the tensors of the answer to the last message of `call`; answers to earlier messages come first."""
        while call.answer is None:
            first = self._unanswered.popleft()
            wait_all(first.works)
            first.answer = self._received(source=self._rank)
        header, tensors = call.answer
        if header.error:
            raise RuntimeError(header.error)
        return tensors

    def _sent(self, header: _Header, tensors: Sequence[Tensor], *, to: int) -> list[Work]:
        tensors = [x.detach().to(self._world.device).contiguous() for x in tensors]
        header = header._replace(shapes=tuple((tuple(x.shape), x.dtype) for x in tensors))
        works = self._world.send_value(header, axis=self._axis, to=to)
        return works + [self._world.send(x, axis=self._axis, to=to) for x in tensors if x.numel()]

    def _received(self, *, source: int) -> tuple[_Header, list[Tensor]]:
        header: _Header = self._world.recv_value(axis=self._axis, source=source)
        tensors = [torch.empty(shape, dtype=dtype, device=self._world.device) for shape, dtype in header.shapes]
        works = [self._world.recv(x, axis=self._axis, source=source) for x in tensors if x.numel()]
        wait_all(works)
        return header, tensors

    # ---- the rank that has the module ------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer the callers until each has called `close`. Raises RuntimeError on a rank without the module."""
        if not self.here:
            raise RuntimeError(f"rank {self._world.rank}: serve() runs only on rank {self._rank}, which has the module")
        active, stepped = set(self._callers), set[int]()
        while active:
            bell = torch.zeros(3, dtype=torch.uint16, device=self._world.device)
            caller = self._world.recv_any(bell, axis=self._axis, sources=sorted(active - stepped))
            header, tensors = self._received(source=caller)
            if header.kind is _Kind.STEP and self.optimizer is not None:
                wait_all(self._replies.pop(caller, ()))  # an answer may share memory with a parameter
                stepped.add(caller)
            else:
                self._answer(caller, header, tensors)
            if header.kind is _Kind.CLOSE:
                active.remove(caller)
                self._kept = {key: kept for key, kept in self._kept.items() if key[0] != caller}
            if stepped and stepped == active:
                assert self.optimizer is not None
                self.optimizer.step()
                self.optimizer.zero_grad()
                self._kept.clear()
                for each in stepped:
                    self._reply(each, _Header(_Kind.STEP), [])
                stepped.clear()
        for caller in self._callers:
            wait_all(self._replies.pop(caller, ()))

    def _answer(self, caller: int, header: _Header, tensors: list[Tensor]) -> None:
        """Run what the message asks for, and answer with the results or the error."""
        results, text = list[Tensor](), ""
        try:
            if header.kind is _Kind.FORWARD:
                results = self._forward(caller, header, tensors)
            elif header.kind is _Kind.BACKWARD:
                results = self._backward(caller, header, tensors)
            elif header.kind is _Kind.STEP:
                raise ValueError("step() of a module without an optimizer: remote(…, optimizer=…)")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - the caller raises it
            text = f"rank {self._rank}, in a remote module: {type(error).__name__}: {error}"
        self._reply(caller, _Header(header.kind, error=text), results)

    def _reply(self, caller: int, header: _Header, tensors: Sequence[Tensor]) -> None:
        """Answer a caller without waiting, because it may first take answers of other owners; the next answer waits."""
        wait_all(self._replies.pop(caller, ()))
        self._replies[caller] = self._sent(header, tensors, to=caller)

    def _forward(self, caller: int, header: _Header, inputs: list[Tensor]) -> list[Tensor]:
        for x, needs in zip(inputs, header.needs, strict=True):
            x.requires_grad_(needs)
        with torch.set_grad_enabled(header.grad):
            given = [x.clone() if needs else x for x, needs in zip(inputs, header.needs, strict=True)]
            result = self.module(*given, **dict(header.keywords))
        outputs = list(result) if isinstance(result, tuple | list) else [result]
        if not all(isinstance(x, Tensor) for x in outputs):
            raise TypeError(f"the module returned {type(result).__name__}; return a tensor or a tuple of tensors")
        if header.grad:
            self._kept[caller, header.call] = [x for x in inputs if x.requires_grad], outputs
        return outputs

    def _backward(self, caller: int, header: _Header, gradients: list[Tensor]) -> list[Tensor]:
        if (caller, header.call) not in self._kept:
            raise ValueError("a backward after its step(), or a second backward of a call; call the module again")
        inputs, outputs = self._kept.pop((caller, header.call))
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]


def remote(
    build: Callable[..., nn.Module],
    *,
    world: World,
    rank: int,
    callers: Sequence[int] = (0,),
    args: Sequence[Any] = (),
    optimizer: Callable[[Iterable[Tensor]], optim.Optimizer] | None = None,
) -> RemoteModule:
    """Build a module on one rank, to be called from others: `y = tower(x)`, then `loss.backward()` and `tower.step()`.

    Every rank of the world calls this. Then rank `rank` calls `serve()`, which returns after each caller's `close()`.

    | build       `build(*args)` returns the module; only rank `rank` calls it
    | callers     ranks that call the module
    | optimizer   `optimizer(parameters)` returns the module's optimizer, for `step()`

    Raises ValueError for ranks that the world does not have. After Damania et al., MLSys 2023."""
    module = RemoteModule(world, rank=rank, callers=callers)
    if module.here:
        module.module = build(*args).to(world.device)
        module.optimizer = None if optimizer is None else optimizer(module.module.parameters())
    return module
