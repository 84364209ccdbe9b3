"""Refuse operations that mix tokens: a rank that has some of the tokens would compute them from its own tokens alone.

A pooling, a convolution over tokens, a cumulative sum or an attention written by hand gives results of the right shape
and the wrong values. So a function that mixes along a dim of tokens is refused when it is called. The message names the
module and the rule that keeps it whole."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from meshwise.attention.token_state import TokenState, token_dims

_ALONG = """
    cumsum cumprod cummax cummin logcumsumexp softmax log_softmax logsumexp mean sum prod max min amax amin argmax
    argmin var std median sort argsort flip diff unbind select norm softmin unfold index_select
"""
_DIM_SECOND: Mapping[str, int] = {"topk": 2, "roll": 2, "chunk": 2, "split": 2, "gather": 1, "narrow": 1}
DIM_ARGUMENT: Mapping[str, int] = {**dict.fromkeys(_ALONG.split(), 1), **_DIM_SECOND}
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
        if by_tokens and x.size(-2) == count and x.size(-1) != count and not isinstance(other, nn.Parameter):
            what = "a product of tokens with tokens (attention by hand; call scaled_dot_product_attention)"
            refuse(what, x=x, state=state)


def mixing_dims(x: Tensor, *, count: int, linear: bool) -> tuple[int, ...]:
    """Return the dims of `x` that count tokens beyond doubt; with `linear`, none of a loss (samples, tokens)."""
    if count < 2:
        return ()
    if x.dim() == 2 and x.is_floating_point():
        return (1,) if x.shape[1] == count and not linear else ()
    found = tuple(token_dims(x, count=count))
    return found if len(found) == 1 else ()


def refuse(what: str, *, x: Tensor, state: TokenState) -> None:
    """Raise ValueError about `what` that mixes the tokens of `x`.

    Do not raise for calls by meshwise itself, nor by two files of transformers. One looks for packed documents in
    position_ids, which is noted in the state. The other keeps tokens for later calls, which training does not have."""
    caller = _caller()
    file = caller.f_globals.get("__name__", "")
    if file in ("transformers.masking_utils", "transformers.cache_utils"):
        state.reads_packing |= caller.f_code.co_name.startswith("find_packed")
        return
    if file.startswith("meshwise.") and not file.startswith("meshwise.reference."):
        return
    module = _running_module()
    name = state.names.get(module, type(module).__name__) if module is not None else ""
    raise ValueError(
        f"{what} of a tensor {tuple(int(size) for size in x.shape)}{f' in {name}' if name else ''} mixes tokens, and "
        f"under cp this rank has {state.own.count} of {state.length}. Give a module all tokens by a rule, "
        f'Options(tensor_rules={{"{name or "NAME"}": "tokens whole"}}), or use cp=1'
    )


def _refuse_cat(parts: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, state: TokenState) -> None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not isinstance(parts, tuple | list) or type(dim) is not int:
        return
    filled = [part for part in parts if isinstance(part, Tensor) and part.numel()]
    for part in filled if len(filled) > 1 else ():
        if dim % part.dim() in mixing_dims(part, count=state.own.count, linear=False) and part.dim() > 2:
            refuse(f"cat along dim {dim % part.dim()}", x=part, state=state)


def _caller() -> Any:
    """Return the frame of Python that called a torch function: the first outside of torch and of this mode."""
    frame: Any = sys._getframe(1)
    around = ("torch.", "meshwise.attention.", "meshwise.model.random_interception")
    while frame.f_back is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(around):
        frame = frame.f_back
    return frame


def _running_module() -> nn.Module | None:
    """Return the innermost module of the user whose forward is running, found on the stack of Python's calls."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not type(owner).__module__.startswith("torch."):
            return owner
        frame = frame.f_back
    return None


MIXING: frozenset[str] = frozenset(DIM_ARGUMENT) | LAST_DIM | RECURRENT | PRODUCTS | {"cat"}
"""Names of all functions that `refuse_mixed` looks at."""
