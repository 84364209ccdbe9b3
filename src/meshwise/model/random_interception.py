"""Replace the random operations of a running model by draws that do not depend on the plan.

There are two modes. `RandomInterception` sees the functions that Python code calls, at a cost of one microsecond each,
but not the operations inside them. `_DrawReplacement` sees every operation below autograd, at five microseconds each.
So the first mode enters the second mode only for functions that may draw; the second mode replaces the draws. One
replacement of `bernoulli_` then serves dropout of any kind, attention, and a model's own stochastic depth.

Functions of dropout are rewritten. Attention with dropout uses torch's plain implementation, because the fused kernels
draw inside. `F.dropout`, the most frequent function, keeps the mask of a large tensor as booleans. On a GPU large
tensors of both take the kernels of `fused_dropout`.

Draws with `generator=` are left to torch. So are complex numbers and other operations (`randperm`), with a warning."""

import abc
import contextlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from meshwise.model import fused_dropout
from meshwise.model.random_bits import BLOCK, Distribution, draw, exponential, keep_mask, normal, shaped, uniform
from meshwise.model.torch_private import LightDispatchMode

_NAMES = """
    dropout dropout_ dropout1d dropout2d dropout3d feature_dropout feature_dropout_ native_dropout
    alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_
    scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu
    bernoulli bernoulli_ rand rand_like randn randn_like uniform_ normal normal_ exponential_ gumbel_softmax
    cauchy_ geometric_ log_normal_ random_ randint randint_like randperm multinomial poisson binomial
    rrelu rrelu_ fractional_max_pool2d fractional_max_pool3d trunc_normal_ kaiming_uniform_ kaiming_normal_
    _standard_gamma _sample_dirichlet
"""
MAY_DRAW = frozenset(_NAMES.split())
"""Names of the functions and methods that may draw."""

_BACKWARDS = (Tensor.backward, torch.autograd.backward)
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


DrawSource: TypeAlias = Any
"""The `RandomDraws` of the model: provider of the key and the slice of each draw."""


class ForwardAndBackwardMode(TorchFunctionMode, abc.ABC):
    """Base of modes that stay active in a backward, which may repeat parts of a forward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BACKWARDS:
            return self._backward(*args, **(kwargs or {}))
        return self._answer(func, args, kwargs or {})

    @abc.abstractmethod
    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a torch function other than a backward; subclasses change some functions."""

    def _backward(
        self, tensors: Any, *, gradient: Any = None, grad_tensors: Any = None, inputs: Any = None, **options: Any
    ) -> None:
        # torch disables a mode while its handler runs, but a forward that is repeated in the backward draws again. With
        # edges of the graph in place of tensors, torch does not call the mode a second time.
        outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [gradient] * len(outputs) if grad_tensors is None else list(grad_tensors)
        wanted = [inputs] if isinstance(inputs, Tensor) else inputs
        with self:
            torch.autograd.backward(
                [_edge(output) for output in outputs],
                [torch.ones_like(o) if g is None else g for o, g in zip(outputs, given, strict=True)],
                inputs=None if wanted is None else [_edge(one) for one in wanted],
                **options,
            )


class RandomInterception(ForwardAndBackwardMode):
    """Mode that replaces the draws of functions by draws of `source`, or seeds torch's generator if `source.local`."""

    def __init__(self, source: DrawSource) -> None:
        super().__init__()
        self._source = source
        self._replacement = _DrawReplacement(source)

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `func`, with meshwise's draws in place of torch's."""
        name = getattr(func, "__name__", "")
        if name == "attend":  # meshwise's own attention gets the source of its draws as an argument
            return func(*args, **{"draws": self._source, **kwargs})
        if name not in MAY_DRAW or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if self._source.local:
            given = kwargs.get("device") or next((a.device for a in args if isinstance(a, Tensor)), None)
            self._source.reseed(torch.device(given or torch.get_default_device()))
            return func(*args, **kwargs)
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        self._replacement.scores = False
        if name == "scaled_dot_product_attention":
            return self._attention(func, args, kwargs)
        if name == "multi_head_attention_forward":
            return self._multi_head_attention(func, args, kwargs)
        with self._replacement:
            return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002, FBT001, FBT002 (F.dropout's own)
        if not training or not 0.0 < p < 1.0 or not input.numel():
            return functional.dropout(input, p, training, inplace)
        if not inplace and (dropped := self._dropped_by_kernel(input, p, scores=False)) is not None:
            return dropped
        factors = input.dtype in (torch.float32, torch.float64) and input.numel() <= BLOCK and not inplace
        kind = keep_mask(1.0 - p, dtype=input.dtype, scaled=True) if factors else keep_mask(1.0 - p)
        with torch._C.DisableTorchFunction():
            keep: Tensor = self._source.mask(input.shape, kind=kind, device=input.device, scores=False)
        if factors:
            return input * keep
        kept_input = input.masked_fill_(keep.logical_not(), 0.0) if inplace else torch.where(keep, input, 0.0)
        return kept_input.mul_(1.0 / (1.0 - p))

    def _dropped_by_kernel(self, x: Tensor, p: float, *, scores: bool) -> Tensor | None:
        if not fused_dropout.can_drop(x):
            return None
        with torch._C.DisableTorchFunction():
            numbers = self._source.numbers(x.shape, keep=1.0 - p, device=x.device, scores=scores)
            return None if numbers is None else fused_dropout.dropout(x, numbers=numbers)

    def _attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(_ATTENTION, args, strict=False)) | kwargs
        dropping, query, seen = given.get("dropout_p"), given["query"], given.get("attn_mask")
        if not dropping:
            return func(*args, **kwargs)
        if 0 < dropping < 1 and fused_dropout.can_attend(given):
            with torch._C.DisableTorchFunction():
                shape = (*query.shape[:3], given["key"].size(2))
                numbers = self._source.numbers(shape, keep=1.0 - dropping, device=query.device, scores=True)
            if numbers is not None:  # FlexAttention needs torch's function modes
                return fused_dropout.attention(given, numbers=numbers)
        exact = query.is_cuda or (query.is_cpu and query.dtype in (torch.float32, torch.float64))
        known = seen is None or seen.dtype in (torch.bool, query.dtype)
        cast = torch.is_autocast_enabled("cuda" if query.is_cuda else "cpu")
        if not (exact and known) or cast or not 0 < dropping < 1 or given.get("enable_gqa"):
            return self._unfused(func, args, kwargs, query)
        if seen is not None and seen.dtype == torch.bool:
            seen = torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(seen.logical_not(), -math.inf)
        return self._masked_attention(given, seen, dropping)

    def _masked_attention(self, given: Mapping[str, Any], seen: Tensor | None, dropping: float) -> Tensor:
        """Return the result of torch's plain implementation, without a mode that sees each of its operations.

        For a value without features, torch computes only the probabilities. Dropout and the product follow here."""
        value, causal, scale = given["value"], bool(given.get("is_causal")), given.get("scale")
        with torch._C.DisableTorchFunction():
            _, weights = torch.ops.aten._scaled_dot_product_attention_math(
                given["query"], given["key"], value[..., :0], seen, 0.0, causal, scale=scale
            )
            dropped = self._dropped_by_kernel(weights, dropping, scores=True)
            if dropped is None:
                kind = keep_mask(1.0 - dropping, dtype=weights.dtype, scaled=True)
                dropped = weights * self._source.mask(weights.shape, kind=kind, device=weights.device, scores=True)
            attended: Tensor = dropped @ value
            return attended

    def _multi_head_attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        dropping = given.arguments["training"] and given.arguments["dropout_p"]
        return self._unfused(func, args, kwargs, given.arguments["query"]) if dropping else func(*args, **kwargs)

    def _unfused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], query: Tensor) -> Any:
        """Run torch's attention by its plain implementation, with its draws replaced.

        The choice of a kernel affects all threads. It is not made on CPUs, where no fused kernel supports dropout."""
        self._replacement.scores = True
        plain = sdpa_kernel(SDPBackend.MATH) if query.is_cuda else contextlib.nullcontext()
        with plain, self._replacement:
            return func(*args, **kwargs)


def _edge(end: Tensor | GradientEdge) -> GradientEdge:
    return get_gradient_edge(end) if isinstance(end, Tensor) else end


class _DrawReplacement(LightDispatchMode):
    """Mode that replaces the operations that draw, below autograd. `scores`: draws are for attention scores."""

    def __init__(self, source: DrawSource) -> None:
        super().__init__()
        self._source = source
        self.scores = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        schema = func._schema
        given = {argument.name: argument.default_value for argument in schema.arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        with torch._C.DisableTorchFunction():
            answer = self._answer(schema.name.removeprefix("aten::"), given)
        if answer is None:
            self._source.warn_not_replaced(str(func))
            return func(*args, **kwargs)
        into: Tensor | None = given.get("out")
        return answer if into is None else into.resize_(answer.shape).copy_(answer)

    def draw(self, shape: Sequence[int], kind: Distribution, device: torch.device) -> Tensor:
        """Return this rank's slice of the next draw, for a tensor of `shape`."""
        part, turned = self._source.part(shape, scores=self.scores)
        return shaped(draw(part, key=self._source.key(), kind=kind, device=device), shape=shape, turned=turned)

    def _filled(self, target: Tensor, kind: Distribution) -> Tensor:
        """Fill `target` with this rank's slice of the next draw, and return it."""
        part, turned = self._source.part(target.shape, scores=self.scores)
        if turned or not target.is_contiguous():
            return target.copy_(self.draw(target.shape, kind, target.device))
        return draw(part, key=self._source.key(), kind=kind, device=target.device, into=target)

    def _answer(self, name: str, given: Mapping[str, Any]) -> Any:
        """Return the result of the operation `name` on arguments by name, or None if it is not replaced."""
        dtypes = (value.dtype if isinstance(value, Tensor) else value for value in given.values())
        if any(isinstance(dtype, torch.dtype) and dtype.is_complex for dtype in dtypes):
            return None
        match name, given:
            case "native_dropout", {"input": Tensor() as input, "p": p, "train": train}:
                p = p if train is None or train else 0.0
                keep = self.draw(input.shape, keep_mask(1.0 - p), input.device)
                return input * keep * (1.0 / (1.0 - p) if p < 1.0 else 1.0), keep
            case "bernoulli_", {"self": Tensor() as target, "p": Tensor() as p}:
                return target.copy_(self._bernoulli(p.expand_as(target)))
            case "bernoulli_", {"self": Tensor() as target, "p": p}:
                return self._filled(target, keep_mask(p, dtype=target.dtype))
            case "bernoulli", {"self": Tensor() as like, "p": p}:
                return self.draw(like.shape, keep_mask(p, dtype=like.dtype), like.device)
            case "bernoulli", {"self": Tensor() as p}:
                return self._bernoulli(p).to(p.dtype)
            case "uniform_", {"self": Tensor() as target, "from": low, "to": high}:
                return self._filled(target, uniform(target.dtype)).mul_(high - low).add_(low)
            case "normal_", {"self": Tensor() as target, "mean": mean, "std": std}:
                return self._filled(target, normal(target.dtype)).mul_(std).add_(mean)
            case "exponential_", {"self": Tensor() as target, "lambd": rate}:
                return self._filled(target, exponential(target.dtype)).div_(rate)
            case "rand" | "randn", {"size": size, "dtype": dtype, "device": device}:
                target = torch.empty(size, dtype=dtype, device=device)
                return self._filled(target, (uniform if name == "rand" else normal)(target.dtype))
            case "rand_like" | "randn_like", {"self": Tensor() as like, "dtype": dtype, "device": device}:
                target = torch.empty_like(like, dtype=dtype, device=device)
                return self._filled(target, (uniform if name == "rand_like" else normal)(target.dtype))
            case "normal", {"mean": mean, "std": std} if isinstance(mean, Tensor) or isinstance(std, Tensor):
                target = torch.empty_like(mean + std)
                return self._filled(target, normal(target.dtype)).mul_(std).add_(mean)
        return None

    def _bernoulli(self, probability: Tensor) -> Tensor:
        wide = torch.promote_types(probability.dtype, torch.float32)
        return self.draw(probability.shape, uniform(wide), probability.device) < probability
