"""Split the tokens of every sequence over the ranks of `cp`, without a change to model or loss (`ContextParallel`).

A micro-batch enters the forward with all tokens. Here it is cut to this rank's tokens, and the model and the loss run
under `TokenInterception`. Each rank returns (sum, count) of its own tokens, and parameters are replicas over `cp`.

transformers finds the attention and the mask of a model by name, in two registries. Here both get functions named
`meshwise`, which call `attend`. The mask is not a tensor but a `Pattern`, translated from transformers' mask functions,
so no rank holds a mask of (tokens, tokens). The functions have no state: the mode that knows the tokens sees `attend`.

docs/context.md has the rules that give a module a pattern, or all tokens."""

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.attention.cp_attention import (
    HEADS,
    ORDER_OF,
    RING,
    TokenAttention,
    TokenState,
    context_world,
    joined_masks,
    rank_order,
    seems_packed,
    sequence_length,
    token_dims,
)
from meshwise.attention.mask_pattern import (
    Combined,
    MaskFunction,
    Pattern,
    Restarts,
    causal,
    full,
    padding,
    parse_pattern,
    window,
)
from meshwise.attention.split_attention import attend
from meshwise.attention.token_interception import TokenInterception
from meshwise.base.tensor_tree import map_tensors
from meshwise.comm.api.world import World
from meshwise.model.parameter_units import matches
from meshwise.plan import Plan, PlanError

_Hooks: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]
"""Functions before and after a module's forward; the module's copies in the stages of a pipeline share them."""
_PATTERN, _WHOLE = "attention pattern=", "tokens whole"


def token_rules(rules: Mapping[str, str] | None) -> dict[str, Pattern | None]:
    """Return the rules about tokens, by pattern of module names: an attention pattern, or None for "tokens whole".

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

    Warns that a pattern changes the model. `planned_roles` refuses a rule that matches no module."""
    handles = contextlib.ExitStack()
    for pattern, rule in rules.items():
        if rule is not None:
            warnings.warn(f"{pattern} attends only to pairs of {rule}: this changes the model", stacklevel=3)
        for one in (one for name, one in module.named_modules() if matches(name, pattern=pattern)):
            enter, leave = _sees_all_tokens(mode) if rule is None else _attends(attention, rule)
            handles.callback(one.register_forward_pre_hook(enter, with_kwargs=True).remove)
            handles.callback(one.register_forward_hook(leave, always_call=True).remove)
    return handles.close


def _attends(attention: TokenAttention, pattern: Pattern) -> _Hooks:
    """Return the hooks of a module whose attentions have a pattern."""
    before: list[Pattern | None] = []

    def enter(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
        outer = attention.rule
        before.append(outer)
        attention.rule = pattern if outer is None else outer & pattern

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        attention.rule = before.pop()

    return enter, leave


def _sees_all_tokens(mode: TokenInterception) -> _Hooks:
    """Return the hooks of a module that gets all tokens on every rank. Its output is cut to this rank's tokens."""
    before: list[TokenState | None] = []

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        state, given = mode.state, (args, kwargs)
        if state is not None:
            found = functools.partial(token_dims, count=state.own.count)
            given = map_tensors(lambda x: state.gather(x, dim=min(found(x))) if found(x) else x, given)
        before.append(state)
        mode.state = None
        return given

    def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
        mode.state = state = before.pop()
        if state is None:
            return output

        def cut(x: Tensor) -> Tensor:
            dims = (1,) if x.dim() == 2 and x.size(1) == state.length else token_dims(x, count=state.length)
            return state.own.take(x, dim=min(dims)) if dims else x

        return map_tensors(cut, output)

    return enter, leave


def _shifts_labels(mode: TokenInterception) -> Callable[..., Any]:
    """Return a hook before a model of transformers that makes its decoder's tokens from labels (T5, BART).

    The hook makes them from all labels, and passes this rank's tokens."""

    def enter(module: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        """Add `decoder_input_ids` unless the decoder's input is given."""
        state = mode.state
        known = None if state is None else state.whole_of.get(id(given.get("labels")))
        inputs = (given.get(key) for key in ("decoder_input_ids", "decoder_inputs_embeds"))
        if state is None or known is None or any(x is not None for x in inputs):
            return None
        mode.state = None
        whole = module.prepare_decoder_input_ids_from_labels(known[1])  # type: ignore[operator]
        mode.state = state
        return args, {**given, "decoder_input_ids": state.own.take(whole, dim=1)}

    return enter


NAME = "meshwise"
"""Name of the attention in transformers' registries."""


def use_attend(module: nn.Module, *, flex_only: bool = False) -> Callable[[], None]:
    """Let every transformers model in `module` call `attend`; return a function that undoes this.

    Calls of torch's FlexAttention become calls of `attend` too, which is not undone. `flex_only`: only those.

    Raises ValueError for a model of transformers whose attention cannot be replaced."""
    undo = contextlib.ExitStack()
    _bind_flex_attention(module)
    if "transformers" not in sys.modules:
        return undo.close
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel  # noqa: PLC0415 - of the extra `hf`

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    models = [one for one in module.modules() if isinstance(one, PreTrainedModel)]
    inner = {one for model in models for one in model.modules() if one is not model}
    for model in models:  # inner models too: transformers before 5.20 skips those with a copy of the config (T5)
        now = model.config._attn_implementation
        if now == NAME or (flex_only and now != "flex_attention"):
            continue
        undo.callback(model.set_attn_implementation, now)
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME and model not in inner:
            raise ValueError(
                f"{type(model).__name__} of transformers has an attention of its own that cannot be replaced; use cp=1"
            )
    return undo.close


def _bind_flex_attention(module: nn.Module) -> None:
    """Let the classes of the modules in `module`, and the files of these classes, call `_flex_attention`."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    kinds = {kind for one in module.modules() for kind in type(one).__mro__} if flex is not None else set()
    own = [kind for kind in kinds if not kind.__module__.startswith(("torch.", "transformers."))]
    for owner in (*own, *(sys.modules[kind.__module__] for kind in own if kind.__module__ in sys.modules)):
        for name, value in list(vars(owner).items()):
            original = inspect.unwrap(value) if isinstance(value, FunctionType) else None
            if flex is not None and original in (flex.flex_attention, flex.create_block_mask):
                setattr(owner, name, _flex_attention if original is flex.flex_attention else _block_mask)


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **given: Any) -> Any:
    """Return what torch's flex_attention returns, computed by `attend`.

    Raises ValueError for a score_mod that reads a tensor that needs a gradient, and for `max_scores`."""
    given |= dict(zip(("score_mod", "block_mask", "scale", "enable_gqa", "return_lse"), args, strict=False))
    block, modify, aux = given.get("block_mask"), given.get("score_mod"), given.get("return_aux")
    if block is not None:
        if not isinstance(block, MaskFunction):
            samples, heads = block.kv_num_blocks.shape[:2]
            block = _block_mask(block.mask_mod, samples, heads)
        block = replace(block, samples=query.size(0) if block.samples > 1 else 1, device=query.device)
    if modify is not None and torch.is_grad_enabled():
        index = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=query.device)
        if modify(index.to(query.dtype), index, index, index, index).requires_grad:
            raise ValueError(
                "the score_mod of flex_attention reads a tensor that needs a gradient, which it would not get; give it "
                "to meshwise.attention.attend as mask=bias"
            )
    if aux is not None and aux.max_scores:
        raise ValueError("flex_attention(return_aux=AuxRequest(max_scores=True)) is not supported; ask for lse alone")
    of_heads = modify is not None or (block is not None and block.heads is not None)
    scale = given.get("scale")
    out, lse = attend(query, key, value, pattern=block, scale=scale, score_mod=modify, of_heads=of_heads, lse=True)
    if aux is not None:
        return out, sys.modules["torch.nn.attention.flex_attention"].AuxOutput(lse=lse if aux.lse else None)
    return (out, lse) if given.get("return_lse") else out


def _block_mask(mask_mod: Callable[..., Tensor], B: int | None, H: int | None, *_: Any, **_given: Any) -> MaskFunction:
    """Return the pattern of a mask function, in place of the BlockMask of torch's create_block_mask."""
    return MaskFunction(mask_mod, B or 1, range(H) if H is not None and H > 1 else None, torch.device("cpu"))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Pattern | Tensor | None,
    *_more: Any,
    **given: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer of transformers, as its `sdpa_attention_forward` and `eager` do."""
    is_causal = given.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    pattern = attention_mask if isinstance(attention_mask, Pattern) else None
    mask = attention_mask if isinstance(attention_mask, Tensor) else None
    if (bias := given.get("position_bias")) is not None:
        mask = bias if mask is None else joined_masks(bias, other=mask)
    if attention_mask is None and is_causal:
        pattern = causal()
    more = {"scale": given.get("scaling"), "softcap": given.get("softcap"), "sinks": given.get("s_aux"), "packed": True}
    out = attend(query, key, value, pattern=pattern, mask=mask, dropout=given.get("dropout", 0.0), **more)
    return out.transpose(1, 2).contiguous(), None


def _mask(
    *, mask_function: Callable[..., Any], attention_mask: Tensor | None = None, q_offset: int = 0, **given: Any
) -> Pattern:
    """Return the pattern of a mask function of transformers and a mask of padding (samples, tokens)."""
    if isinstance(q_offset, int) and q_offset:
        raise ValueError("a cache with earlier tokens does not work under cp; call the model with use_cache=False")
    device = torch.device(given.get("device") or "cpu")
    pattern = pattern_of_mask_function(mask_function, samples=given["batch_size"], device=device)
    return pattern if attention_mask is None else pattern & padding(attention_mask)


def pattern_of_mask_function(function: Callable[..., Any], *, samples: int, device: torch.device) -> Pattern:
    """Return a mask function of transformers as a pattern. `device`: of the tensors that the function reads."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    inside = dict(zip(function.__code__.co_freevars, cells, strict=True))
    again = functools.partial(pattern_of_mask_function, samples=samples, device=device)
    match function.__qualname__.split(".")[0]:
        case "causal_mask_function":
            return causal()
        case "bidirectional_mask_function":
            return full()
        case "and_masks" | "or_masks" as name:
            return Combined(tuple(map(again, inside["mask_functions"])), every=name == "and_masks")
        case "sliding_window_overlay":
            return window(inside["sliding_window"])  # transformers joins it with the causal mask
        case "sliding_window_bidirectional_overlay":
            return window(inside["sliding_window"] + 1)
        case "packed_sequence_mask_function":
            return Restarts(inside["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            return again(inside["mask_function"])
    return MaskFunction(function, samples, None, device)


class ContextParallel:
    """Context parallelism on one rank: cuts batches to its tokens, and runs attentions over the tokens of all ranks."""

    def __init__(
        self, plan: Plan, *, world: World, rules: Mapping[str, Pattern | None] | None = None, dense: bool = False
    ) -> None:
        """`rules`: as `token_rules` returns them. `dense`: compute attention under a rule by torch's, with a mask.

        Raises PlanError when `cp_heads` does not divide `cp`."""
        self._world = context_world(world, plan=plan)
        self._splits = plan.cp > 1
        self._order = ORDER_OF.get(plan.context, "zigzag")
        self._rules = rules or {}
        self.attention = TokenAttention(self._world, plan.context, dense)
        self.mode = TokenInterception(self.attention)

    @classmethod
    def of(cls, plan: Plan, *, world: World, rules: Mapping[str, str] | None) -> "ContextParallel | None":
        """Return the context parallelism of a plan and of rules; None if `cp` is 1 and no rule is about tokens."""
        found = token_rules(rules)
        return cls(plan, world=world, rules=found) if plan.cp > 1 or found else None

    def install(self, module: nn.Module) -> Callable[[], None]:
        """Let the models of transformers in `module` call this attention, and register the hooks of the rules.

        Return a function that undoes both. Raises PlanError under cp for learned prompts of PEFT."""
        adapters = (getattr(module, "peft_config", None) or {}).values()
        if self._splits and any(getattr(config, "is_prompt_learning", False) for config in adapters):
            raise PlanError(
                "learned prompts of PEFT lengthen every sequence inside the model, and cp splits sequences before it; "
                "use cp=1, or LoRA"
            )
        undo = contextlib.ExitStack()
        undo.callback(use_attend(module))
        undo.callback(install_rules(module, rules=self._rules, mode=self.mode, attention=self.attention))
        for one in module.modules() if self._splits else ():
            if callable(getattr(one, "prepare_decoder_input_ids_from_labels", None)):
                undo.callback(one.register_forward_pre_hook(_shifts_labels(self.mode), with_kwargs=True).remove)
        return undo.close

    def over_tokens(self, x: Tensor, *, function: Callable[[Tensor], Tensor], dim: int) -> Tensor:
        """Return `function` of `x` with all tokens along `dim`; the result is cut to this rank's tokens along `dim`."""
        state = self.mode.state
        return function(x) if state is None else state.own.take(function(state.gather(x, dim=dim)), dim=dim)

    def on_own_tokens(self, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a forward of (model, batch), or a loss of (output, batch), that gets this rank's tokens."""
        return lambda subject, batch: function(subject, self._cut(batch))

    def _cut(self, batch: Any) -> Any:
        """Return the batch with this rank's tokens; the batch itself outside of a training or evaluation step."""
        if not self.mode.active or not self._splits:
            return batch
        state = self.mode.state
        if state is None or state.batch is not batch:
            length = sequence_length(batch)
            ring, heads = self._world.group(RING), self._world.group(HEADS)
            packed = self.attention.context == "auto" and seems_packed(batch, length=length)
            order = rank_order("striped" if packed else self._order, length=length, ring=ring.size, heads=heads.size)
            state = TokenState(self._world, length, order, ring.index * heads.size + heads.index)
            state.take_batch(batch)
            self.mode.state = state
        return state.cut
