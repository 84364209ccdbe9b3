"""Rules that give a module a pattern or all tokens, stated with the rules of tensor parallelism.

| "attention pattern=PATTERN"   the attentions inside the module attend to the pattern's pairs alone, which changes
|                               the model: "attention pattern=window:1024+global:64"
| "tokens whole"                with cp, the module gets all tokens, and returns this rank's"""

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import nn

from meshwise.attention.mask_pattern import Pattern, parse_pattern
from meshwise.attention.token_attention import TokenAttention
from meshwise.attention.token_interception import TokenInterception
from meshwise.attention.token_state import TokenState, token_dims
from meshwise.base.tensor_tree import map_tensors
from meshwise.model.parameter_units import matches

_Hooks: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]
"""Functions before and after a module's forward; the module's copies in the stages of a pipeline share them."""
_PATTERN, _WHOLE = "attention pattern=", "tokens whole"


def token_rules(rules: Mapping[str, str] | None) -> dict[str, Pattern | None]:
    """Return the rules about tokens, by pattern of module names: a pattern of attention, or None for tokens whole.

    Raises ValueError for a text that is no pattern."""
    found: dict[str, Pattern | None] = {}
    for pattern, text in (rules or {}).items():
        if text.startswith(_PATTERN):
            found[pattern] = parse_pattern(text.removeprefix(_PATTERN))
        elif text == _WHOLE:
            found[pattern] = None
    return found


def install_rules(
    module: nn.Module, *, rules: Mapping[str, Pattern | None], mode: TokenInterception, attention: TokenAttention
) -> Callable[[], None]:
    """Register the hooks of the rules on the modules that match; return a function that removes them.

    Warns that a pattern changes the model. Raises ValueError for a rule that matches no module."""
    handles = contextlib.ExitStack()
    for pattern, rule in rules.items():
        found = [one for name, one in module.named_modules() if matches(name, pattern=pattern)]
        if not found:
            raise ValueError(f"rule {pattern!r} matches no module; name one as in named_modules()")
        if rule is not None:
            warnings.warn(f"{pattern} attends only to pairs of {rule}: this changes the model", stacklevel=3)
        for one in found:
            enter, leave = _sees_all_tokens(mode) if rule is None else _attends(attention, rule)
            handles.callback(one.register_forward_pre_hook(enter, with_kwargs=True).remove)
            handles.callback(one.register_forward_hook(leave, always_call=True).remove)
    return handles.close


def _attends(attention: TokenAttention, pattern: Pattern) -> _Hooks:
    """Return the hooks of a module whose attentions have a pattern."""
    before: list[Pattern | None] = []

    def enter(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
        """Restrict the pattern of the module around by this one."""
        outer = attention.rule
        before.append(outer)
        attention.rule = pattern if outer is None else outer & pattern

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        """Restore the pattern of the module around."""
        attention.rule = before.pop()

    return enter, leave


def _sees_all_tokens(mode: TokenInterception) -> _Hooks:
    """Return the hooks of a module that gets all tokens, computes them on every rank, and returns this rank's."""
    before: list[TokenState | None] = []

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the tokens of the arguments, and end the interception."""
        state, given = mode.state, (args, kwargs)
        if state is not None:
            given = map_tensors(
                lambda x: state.gather(x, dim=1) if 1 in token_dims(x, count=state.own.count) else x, given
            )
        before.append(state)
        mode.state = None
        return given

    def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
        """Take this rank's tokens of the output, and begin the interception again."""
        mode.state = state = before.pop()
        if state is None:
            return output
        return map_tensors(
            lambda x: state.own.take(x, dim=1) if x.dim() > 1 and x.size(1) == state.length else x, output
        )

    return enter, leave
