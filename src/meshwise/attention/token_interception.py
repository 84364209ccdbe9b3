"""Run a model on this rank's tokens as if it had all tokens (`TokenInterception`).

The mode sees the torch functions that the model and the loss call, in the forward and in a repeated forward.
docs/context.md has a table of what they return. Dims of tokens are `TokenCount`s, and `arange` of such a count gives
global positions. Attention is over the tokens of all ranks. A function that mixes tokens otherwise raises an error.
Everything else works token by token and is left alone."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwise.attention.mixed_tokens import MIXING, mixing_dims, refuse, refuse_mixed
from meshwise.attention.split_attention import attend
from meshwise.attention.token_state import TokenState, token_dims
from meshwise.model.random_draws import SampleRows
from meshwise.model.random_interception import ForwardAndBackwardMode

_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
_SIZED = ("ones", "zeros", "full", "empty", "rand", "randn", "new_full", "new_ones", "new_zeros", "new_empty")
_ATTENTION = (functional.scaled_dot_product_attention, attend, functional.multi_head_attention_forward)

Attention = Callable[[TokenState | None, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Function of (tokens, torch function, arguments, keyword arguments) that computes an attention over all tokens."""


class TokenCount(int):
    """Number of tokens on this rank for reshapes; the whole number in comparisons.

    A model makes positions from the length of a tensor: `torch.arange(x.size(1))`, `table[:x.size(1)]`. So the length
    remembers that it counts tokens. `whole`: number of tokens of the sequence."""

    whole: int

    @classmethod
    def of(cls, count: int, *, whole: int) -> "TokenCount":
        """Return `count` with the number of all tokens."""
        made = cls(count)
        made.whole = whole
        return made

    def __add__(self, other: Any) -> Any:
        return self if type(other) is int and other == 0 else int(self) + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self if type(other) is int and other == 0 else int(self) - other

    def __eq__(self, other: object) -> bool:
        return int(self) == other or self.whole == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(int(self))

    def __lt__(self, other: Any) -> Any:
        return self.whole < _whole(other)

    def __le__(self, other: Any) -> Any:
        return self.whole <= _whole(other)

    def __gt__(self, other: Any) -> Any:
        return self.whole > _whole(other)

    def __ge__(self, other: Any) -> Any:
        return self.whole >= _whole(other)


def _whole(other: Any) -> Any:
    return other.whole if isinstance(other, TokenCount) else other


class TokenInterception(ForwardAndBackwardMode):
    """Mode in which the functions of a model that depend on the number of tokens know of all tokens."""

    def __init__(self, attention: Attention) -> None:
        """`attention`: called in place of the functions that compute attention."""
        super().__init__()
        self.state: TokenState | None = None
        """Tokens of the present micro-batch; None before its forward, and where tokens are whole."""
        self.active = False
        """True inside of `running`."""
        self._backward_runs = False
        self._attention = attention
        self._states: dict[tuple[int, int], TokenState | None] = {}

    @contextlib.contextmanager
    def running(self, rows: SampleRows, *, again: bool = False) -> Iterator[None]:
        """Intercept functions in the block: a forward of the samples `rows` or, with `again`, its backward."""
        self._backward_runs = again
        place = rows.first, rows.count
        self.state, self.active = self._states.get(place) if again else None, True
        try:
            with self:
                yield
        finally:
            if not again:
                self._states[place] = self.state
            self.state, self.active = None, False

    def positions(self) -> Tensor | None:
        """Return the global positions of this rank's tokens in the present forward; None if it has all tokens."""
        state = self.state
        return None if state is None or len(state.order) == 1 else state.own.positions()

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `func` for a model that has all tokens."""
        if self._backward_runs and not torch.is_grad_enabled():  # backward of an operation, not a repeated forward
            return func(*args, **kwargs)
        if func in _ATTENTION:
            return self._attention(self.state, func, args, kwargs)
        state = self.state
        if state is None or len(state.order) == 1:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func == _SHAPE or name == "size":
            return self._size(func, args, kwargs, state)
        if name == "__getitem__":
            return self._item(func, args, state)
        if name == "arange":
            return self._arange(func, args, kwargs, state)
        if name in _SIZED:
            args = _whole_square(args, state)
        elif name == "pad":
            return self._pad(func, args, kwargs, state)
        elif name in MIXING:
            refuse_mixed(name, args=args, kwargs=kwargs, state=state)
        return func(*args, **kwargs)

    def _size(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: TokenState) -> Any:
        found, x = func(*args, **kwargs), args[0]
        with torch._C.DisableTorchFunction():
            dims = token_dims(x, count=state.own.count)
        if not dims:
            return found
        if isinstance(found, torch.Size):
            sizes = [TokenCount.of(size, whole=state.length) if dim in dims else size for dim, size in enumerate(found)]
            return torch.Size(sizes)
        asked = (args[1] if len(args) > 1 else kwargs["dim"]) % x.dim()
        return TokenCount.of(found, whole=state.length) if asked in dims else found

    def _arange(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: TokenState) -> Any:
        counted = [arg for arg in (*args, kwargs.get("end")) if isinstance(arg, TokenCount)]
        if not counted:
            return func(*args, **kwargs)
        start = args[0] if len(args) > 1 else kwargs.get("start", 0)
        step = args[2] if len(args) > 2 else kwargs.get("step", 1)
        if start != 0 or step != 1 or int(counted[-1]) != state.own.count:
            raise ValueError(
                f"arange({start}, {int(counted[-1])}, {step}) counts tokens in another way than from 0 to all; under "
                "cp, pass position_ids with the batch"
            )
        dtype = kwargs.get("dtype") or torch.int64
        return state.own.positions(device=kwargs.get("device")).to(dtype)

    def _pad(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: TokenState) -> Any:
        padded = func(*args, **kwargs)
        known = state.whole_of.get(id(args[0]))
        if known is not None and known[1].dim() == 2:
            state.whole_of[id(padded)] = (padded, func(known[1], *args[1:], **kwargs))
        return padded

    def _item(self, func: Any, args: tuple[Any, ...], state: TokenState) -> Any:
        x, index = args
        items = list(index) if isinstance(index, tuple) else [index]
        dims = _dims_of(items, x.dim())
        if dims is None:
            return func(x, index)
        slices = [(number, item) for number, item in enumerate(items) if isinstance(item, slice)]
        counted = [n for n, item in slices if isinstance(item.stop, TokenCount) and item.start in (None, 0)]
        tables = [number for number in counted if x.shape[dims[number]] != state.own.count]
        for number in counted:
            items[number] = slice(None)
        for number in tables:
            dim = dims[number]
            if x.shape[dim] < state.length:
                raise ValueError(
                    f"a table with {x.shape[dim]} positions (dim {dim} of a tensor {tuple(x.shape)}) does not have the "
                    f"{state.length} tokens of the sequence; use shorter sequences"
                )
            if len(tables) == 1:
                x = state.own.take(x, dim=dim)
            else:
                items[number] = slice(0, state.length)
        return self._tokens_of(func, x, items, dims, state)

    def _tokens_of(self, func: Any, x: Tensor, items: list[Any], dims: list[int], state: TokenState) -> Any:
        """Index a tensor with this rank's tokens; an index that takes some of the tokens is changed or refused."""
        mixing = mixing_dims(x, count=state.own.count, linear=False)
        known = state.whole_of.get(id(x))
        if known is not None:
            mixing = (1,)
        for number, item in enumerate(items):
            if item is None or item is Ellipsis or dims[number] not in mixing:
                continue
            dim, whole = dims[number], known[1].size(1) if known is not None else state.length
            paired = state.own.without(whole - 1)
            if isinstance(item, slice) and _bounds(item) == (0, -1, 1):
                x, items[number] = x.narrow(dim, 0, paired.count), slice(None)
            elif isinstance(item, slice) and _bounds(item) == (1, None, 1) and known is not None:
                x, items[number] = paired.take(known[1].narrow(1, 1, whole - 1), dim=1), slice(None)
            elif (isinstance(item, slice) and _bounds(item) != (0, None, 1)) or type(item) is int:
                refuse(f"the index [{_text(item)}] of dim {dim}", x=x, state=state)
        return func(x, tuple(items))


def _bounds(item: slice) -> tuple[int, int | None, int]:
    return item.start or 0, item.stop, item.step or 1


def _text(item: Any) -> str:
    if not isinstance(item, slice):
        return str(item)
    return ":".join("" if part is None else str(part) for part in (item.start, item.stop))


def _dims_of(items: list[Any], dims: int) -> list[int] | None:
    """Return the dim that each item of an index selects from (-1 for a new dim); None if an item takes several dims."""
    taken = sum(item is not None and item is not Ellipsis for item in items)
    found, dim = [], 0
    for item in items:
        if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
            return None
        found.append(-1 if item is None else dim)
        dim += dims - taken if item is Ellipsis else item is not None
    return found


def _whole_square(args: tuple[Any, ...], state: TokenState) -> tuple[Any, ...]:
    """Return the arguments of a function that makes a tensor, with all tokens if two dims count tokens (a mask)."""

    def whole(sizes: Any) -> Any:
        if not isinstance(sizes, tuple | list) or sum(isinstance(size, TokenCount) for size in sizes) < 2:
            return sizes
        return tuple(state.length if isinstance(size, TokenCount) else size for size in sizes)

    args = tuple(whole(arg) for arg in args)
    return whole(args) if all(isinstance(arg, int) for arg in args) else args
