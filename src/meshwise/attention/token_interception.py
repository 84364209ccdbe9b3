"""Run a model on this rank's tokens as if it had all tokens (`TokenInterception`).

The mode sees the torch functions that the model and the loss call, in the forward and in a repeated forward.
docs/context.md has a table of what they return, and says why other functions that mix tokens raise an error. Dims of
tokens are `TokenCount`s, and `arange` of such a count gives global positions. Attention is over the tokens of all
ranks. Everything else works token by token and is left alone."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.attention.cp_attention import TokenState, token_dims
from meshwise.attention.split_attention import attend
from meshwise.model.random_draws import SampleRows
from meshwise.model.random_interception import ForwardAndBackwardMode

_ALONG = """
    cumsum cumprod cummax cummin logcumsumexp softmax log_softmax logsumexp mean sum prod max min amax amin argmax
    argmin var std median sort argsort flip diff unbind select norm softmin unfold index_select gather narrow
"""
DIM_ARGUMENT: Mapping[str, int] = {**dict.fromkeys(_ALONG.split(), 1), "topk": 2, "roll": 2, "chunk": 2, "split": 2}
"""By name of a function that mixes along a dim: the number of the argument that names the dim."""
LAST_DIM = frozenset(
    ["conv1d", "avg_pool1d", "max_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d", "interpolate"]
)
"""Names of functions that mix along the last dim of (samples, channels, tokens)."""
RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
PRODUCTS = frozenset(["matmul", "__matmul__", "bmm"])


def refuse_mixed(name: str, *, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: TokenState) -> None:
    """Raise ValueError if the function `name` mixes tokens when it is called with these arguments."""
    count = state.own.count
    x = args[0] if args else kwargs.get("input")
    if name == "cat":
        _refuse_cat(x, args, kwargs, state=state)
        return
    if name == "einsum":
        _refuse_einsum(x, args[1:], state=state)
        return
    if not isinstance(x, Tensor):
        return
    if name in DIM_ARGUMENT:
        place = DIM_ARGUMENT[name]
        given = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else None))
        mixing = set(mixing_dims(x, count=count, linear=name == "sum"))
        named = given if isinstance(given, tuple | list) else (given,)
        for dim in named:
            if type(dim) is int and dim % x.dim() in mixing:
                refuse(f"{name} over dim {dim % x.dim()}", x=x, state=state)
    elif name in LAST_DIM:
        kernel = args[1] if len(args) > 1 else None
        if x.dim() == 3 and x.shape[2] == count and not (isinstance(kernel, Tensor) and kernel.size(-1) == 1):
            refuse(f"{name} over dim 2", x=x, state=state)
    elif name in RECURRENT:
        if x.dim() == 3 and count in x.shape[:2]:
            refuse(f"{name}, from token to token,", x=x, state=state)
    elif name in PRODUCTS:
        other = args[1] if len(args) > 1 else None
        by_tokens = isinstance(other, Tensor) and min(x.dim(), other.dim()) >= 3 and other.size(-1) == count
        if by_tokens and x.size(-2) == count and x.size(-1) not in (1, count) and not isinstance(other, nn.Parameter):
            what = "a product of tokens with tokens (attention by hand; call scaled_dot_product_attention)"
            refuse(what, x=x, state=state)


def mixing_dims(x: Tensor, *, count: int, linear: bool) -> tuple[int, ...]:
    """Return the dims of `x` that surely count tokens. `linear`: no dim of (samples, tokens), such as losses."""
    if count < 2:
        return ()
    if x.dim() == 2 and x.is_floating_point():
        return (1,) if x.shape[1] == count and not linear else ()
    found = tuple(token_dims(x, count=count))
    return found if len(found) == 1 else ()


def refuse(what: str, *, x: Tensor, state: TokenState) -> None:
    """Raise ValueError about `what` that mixes the tokens of `x`.

    Do not raise for calls by meshwise itself, nor by two files of transformers. One looks for packed documents in
    position_ids, which the state then records. The other caches tokens for later calls, which training lacks."""
    caller = _caller()
    file = caller.f_globals.get("__name__", "")
    if file in ("transformers.masking_utils", "transformers.cache_utils"):
        state.reads_packing |= caller.f_code.co_name.startswith("find_packed")
        return
    if file.startswith("meshwise.") and not file.startswith("meshwise.reference."):
        return
    raise ValueError(
        f"{what} of a tensor {tuple(int(size) for size in x.shape)} mixes tokens, and under cp this rank has "
        f"{state.own.count} of {state.length}; use cp=1, or a module that a rule gives all tokens"
    )


def _refuse_cat(parts: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, state: TokenState) -> None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not isinstance(parts, tuple | list) or type(dim) is not int:
        return
    filled = [part for part in parts if isinstance(part, Tensor) and part.numel()]
    for part in filled if len(filled) > 1 else ():
        if dim % part.dim() in mixing_dims(part, count=state.own.count, linear=False) and part.dim() > 2:
            refuse(f"cat along dim {dim % part.dim()}", x=part, state=state)


def _refuse_einsum(equation: Any, operands: tuple[Any, ...], *, state: TokenState) -> None:
    """Refuse an einsum that sums over the tokens of two operands, or multiplies tokens with tokens."""
    known = [isinstance(x, Tensor) and x.dim() > 2 and not isinstance(x, nn.Parameter) for x in operands]
    if not isinstance(equation, str) or not all(known):
        return
    inputs, _, output = equation.replace(" ", "").partition("->")
    tokens = []
    for part, x in zip(inputs.split(","), operands, strict=False):
        before, _, after = part.partition("...")
        sizes = (*zip(before, x.shape, strict=False), *zip(after[::-1], x.shape[::-1], strict=False))
        tokens.append({letter for letter, size in sizes if size == state.own.count})
    for first, second in itertools.combinations(tokens, 2):
        pairs = [(first - second) & set(output), (second - first) & set(output)]
        if (first & second) - set(output) or all(pairs):
            refuse(f"einsum({equation!r})", x=operands[0], state=state)


def _caller() -> Any:
    """Return the frame of Python that called a torch function: the first outside of torch and of modes."""
    frame: Any = sys._getframe(1)
    around = ("torch.", "meshwise.attention.", "meshwise.model.random_interception")
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_function__" or f"{frame.f_globals.get('__name__', '')}.".startswith(around)
    ):
        frame = frame.f_back
    return frame


MIXING: frozenset[str] = frozenset(DIM_ARGUMENT) | LAST_DIM | RECURRENT | PRODUCTS | {"cat", "einsum"}
"""Names of all functions that `refuse_mixed` looks at."""


_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
_SIZED = ("ones", "zeros", "full", "empty", "rand", "randn", "new_full", "new_ones", "new_zeros", "new_empty")
_NAMES = ("sub", "rsub", "lt", "le", "gt", "ge", "eq", "ne")
_COMPARED = frozenset((*_NAMES, *(f"__{name}__" for name in _NAMES)))
"""Names of functions that compare two tensors of positions."""
_ATTENTION = (functional.scaled_dot_product_attention, attend, functional.multi_head_attention_forward)

Attention = Callable[[TokenState | None, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Function of (tokens, torch function, arguments, keyword arguments) that computes an attention over all tokens."""


class TokenCount(int):
    """Number of this rank's tokens; `<` and `>` compare the number of all tokens, and `==` is true for both.

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
    """Mode in which torch functions that depend on the number of tokens work as if this rank had all tokens."""

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

    def snapshot(self) -> TokenState | None:
        """Return the tokens at this place of the forward, for a repeated forward."""
        return self.state

    @contextlib.contextmanager
    def restored(self, place: TokenState | None) -> Iterator[None]:
        """Inside the block, use the tokens of `place`, a result of `snapshot`: modules with all tokens repeat so."""
        before, self.state = self.state, place
        try:
            yield
        finally:
            self.state = before

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
            found = self._item(func, args, state)
            if args[0].dim() == 3 and found.shape == args[0].shape[:2] == (args[0].shape[0], state.own.count):
                state.features[id(found)] = found
            return found
        if name == "arange":
            return self._arange(func, args, kwargs, state)
        if name in _SIZED:
            args = _whole_square(args, state)
        elif name == "__setitem__":
            _refuse_assignment(args[0], index=args[1], state=state)
        elif name == "pad":
            return self._pad(func, args, kwargs, state)
        elif name == "flex_attention":
            raise ValueError(
                "flex_attention is called in a file that has no class of the model, so it got only this rank's tokens; "
                "call it in a method of a module"
            )
        elif name in _COMPARED:
            args = _row_of_all(args, state)
        elif name in MIXING:
            refuse_mixed(name, args=args, kwargs=kwargs, state=state)
        return func(*args, **kwargs)

    def _size(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: TokenState) -> Any:
        found, x = func(*args, **kwargs), args[0]
        with torch._C.DisableTorchFunction():
            dims = (1,) if id(x) in state.features else token_dims(x, count=state.own.count)
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
                f"arange({start}, {int(counted[-1])}, {step}) does not count from 0 to all tokens; under "
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
            paired = state.own.below(whole - 1)
            if isinstance(item, slice) and _bounds(item) == (0, -1, 1):
                x, items[number] = x.narrow(dim, 0, paired.count), slice(None)
            elif isinstance(item, slice) and _bounds(item) == (1, None, 1) and known is not None:
                x, items[number] = paired.take(known[1].narrow(1, 1, whole - 1), dim=1), slice(None)
            elif (isinstance(item, slice) and _bounds(item) != (0, None, 1)) or type(item) is int:
                refuse(f"the index [{_text(item)}] of dim {dim}", x=x, state=state)
        return func(x, tuple(items))


def _refuse_assignment(x: Tensor, *, index: Any, state: TokenState) -> None:
    """Raise ValueError for an assignment to a part of the tokens, as in a shift of labels."""
    items = list(index) if isinstance(index, tuple) else [index]
    mixing = mixing_dims(x, count=state.own.count, linear=False)
    for item, dim in zip(items, _dims_of(items, x.dim()) or (), strict=False):
        if isinstance(item, slice) and dim in mixing and _bounds(item) != (0, None, 1):
            refuse(
                f"an assignment to [{_text(item)}] (of shifted labels? put decoder_input_ids into the batch)",
                x=x,
                state=state,
            )


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


def _row_of_all(args: tuple[Any, ...], state: TokenState) -> tuple[Any, ...]:
    """Return the arguments of a comparison; a row of positions that is compared with a column gets all positions.

    So a relative bias or mask that a model makes from positions has this rank's queries and all keys."""
    count = state.own.count
    if len(args) < 2 or not all(isinstance(x, Tensor) and x.dim() and x.numel() == count for x in args):
        return args
    columns = [x.dim() > 1 and tuple(x.shape[-2:]) == (count, 1) for x in args]
    if not any(columns) or (all(columns) and count > 1):
        return args
    places = state.own.positions(device=args[0].device)
    if not all(x.is_meta or bool((x.flatten() == places).all()) for x in args):
        return args
    if all(columns):
        raise ValueError(
            f"a rank has one of {state.length} tokens: a row and a column of positions are equal; use longer sequences"
        )
    row = args[columns.index(False)]
    whole = torch.arange(state.length, dtype=row.dtype, device=row.device).view(*row.shape[:-1], -1)
    return (args[0], whole) if columns[0] else (whole, args[1])


def _whole_square(args: tuple[Any, ...], state: TokenState) -> tuple[Any, ...]:
    """Return the arguments of a function that makes a tensor, with all tokens if two dims count tokens (a mask)."""

    def whole(sizes: Any) -> Any:
        if not isinstance(sizes, tuple | list) or sum(isinstance(size, TokenCount) for size in sizes) < 2:
            return sizes
        return tuple(state.length if isinstance(size, TokenCount) else size for size in sizes)

    args = tuple(whole(arg) for arg in args)
    return whole(args) if all(isinstance(arg, int) for arg in args) else args
