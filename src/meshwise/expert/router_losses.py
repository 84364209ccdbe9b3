"""Add losses of the routers to the loss of a step: they keep the load of the experts even, and the scores small.

docs/experts.md has the losses and their papers ("Keep the load even"). Each is a number for each token and mixture.
Multiplied by its weight, it is added to the sum that the loss returns. So no plan changes it.

Hooks compute the losses before the experts run. `attach` lets the backward begin at them too. So they work in every
pipeline stage and recomputed block, for models that return no scores of their routers."""

import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import tensors
from meshwise.comm.api.autograd_collectives import uncompiled
from meshwise.model.find_mixtures import Mixture
from meshwise.plan import PlanError

SHARES = "expert_shares"
"""Name of a router's buffer (experts,): the parts of the choices that the experts got in the step before."""

OverTokens: TypeAlias = Callable[..., Tensor]
"""Function of (x, function, dim): gives `function` all tokens of x along `dim`, and returns this rank's tokens."""


@dataclass(frozen=True)
class RouterLosses:
    """Weights of the routers' losses; False if all are 0."""

    balance: float = 0.0
    """Weight of the balance loss."""
    z: float = 0.0
    """Weight of the z-loss."""
    over: str = "sequence"
    """`sequence` or `batch`: the tokens over which the balance loss evens the load."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the losses that a mapping states. Raises PlanError for an unknown key or a wrong value."""
        for key, value in given.items():
            is_weight = type(value) in (int, float) and 0 <= value < math.inf
            if not (is_weight if key in ("balance", "z") else key == "over" and value in ("sequence", "batch")):
                raise PlanError(
                    f"router_losses: {key}={value!r} is wrong. balance and z are weights of at least 0, and over is "
                    "sequence or batch; write balance=0.01 z=0.001 over=sequence"
                )
        return cls(**given)

    def __bool__(self) -> bool:
        return bool(self.balance or self.z)

    @property
    def needs_shares(self) -> bool:
        """True if the balance loss takes the shares of the experts in the step before."""
        return bool(self.balance) and self.over == "batch"

    def total(self, scores: Tensor, *, shares: Tensor) -> Tensor:
        """Return the weighted sum over all tokens: a scalar. `scores`: (…, experts); `shares` broadcasts to them.

        For a token: balance = experts · Σ share · probability, and z = (log Σ exp score)²."""
        balance = scores.size(-1) * (shares * scores.softmax(-1)).sum(-1) if self.balance else 0.0
        return (self.balance * balance + self.z * scores.logsumexp(-1).square()).sum()


def outermost(name: str) -> str:
    """Return the name of the wrapper of PEFT that holds the experts called `name`; `name` itself without one."""
    return re.sub(r"(\.base_layer)*$", "", name)


def module_around(name: str) -> str:
    """Return the name of the module around the experts called `name`, and around their wrappers by PEFT."""
    return outermost(name).rpartition(".")[0]


def tokens_of_sample(around: nn.Module, *, arguments: Any, option: str) -> int:
    """Return the tokens of each sample that the module around experts gets; `option` is for the message.

    Raises ValueError unless its first tensor is hidden states (samples, tokens, features)."""
    shape = next(tensors(arguments)).shape
    if len(shape) != 3:
        raise ValueError(
            f"{option}: {type(around).__name__} got {tuple(shape)}, which does not show the samples. Give it hidden "
            f"states (samples, tokens, features), or leave {option.partition('=')[0]} out"
        )
    return shape[1]


def router_of(module: nn.Module, *, name: str, experts: int) -> nn.Module | None:
    """Return the router beside the experts called `name`; None if it is not found.

    It has a weight (experts, features). A word of its name is `router` or `gate`, or no other module has such a weight.
    """
    inside, found = set(module.get_submodule(outermost(name)).modules()), dict[str, bool]()
    around = module.get_submodule(module_around(name))
    for key, each in around.named_modules():
        weight, words = getattr(each, "weight", None), key.split(".")
        is_like = isinstance(weight, Tensor) and weight.shape[:-1] == (experts,)
        if is_like and each not in inside and not {"lora_A", "lora_B"} & set(words):
            found[key.removesuffix(".base_layer")] = bool({"router", "gate"} & set(words))
    named = [key for key, is_named in found.items() if is_named] or (list(found) if len(found) == 1 else [])
    return around.get_submodule(named[0]) if named else None


def chosen_experts(mixture: Mixture, *, arguments: Any) -> Tensor:
    """Return 1 for each expert that a token chose, else 0: (tokens, experts). `arguments`: of the module of experts."""
    first, *rest = tensors(arguments)
    if mixture.form == "rows":
        return (first != 0).any(-1).view(mixture.experts, -1).T.long()
    index = next(each for each in rest if not each.is_floating_point())
    index = index.reshape(-1, index.size(-1))
    return index.new_zeros(len(index), mixture.experts + 1).scatter_(1, index, 1)[:, :-1]


class MixtureLoss:
    """Hooks that compute the routers' losses of one mixture: on the module around it, its router and its experts."""

    def __init__(
        self, losses: RouterLosses, *, mixture: Mixture, over_tokens: OverTokens | None, attach: Callable[..., Tensor]
    ) -> None:
        """`attach(x, loss)` adds the loss to the step, and returns `x` with a backward that begins at the loss too.

        `over_tokens`: None if this rank has all tokens of its samples."""
        self._losses, self._mixture, self._attach = losses, mixture, attach
        self._over_tokens: OverTokens = over_tokens or (lambda x, *, function, **_: function(x))
        self._tokens = 0
        self._scores: Tensor | None = None

    def install(self, module: nn.Module, *, name: str, undo: ExitStack) -> None:
        """Add the hooks to a model, in which the mixture is called `name`, until `undo` is closed."""
        self._router = router_of(module, name=name, experts=self._mixture.experts)
        assert self._router is not None
        around = module.get_submodule(module_around(name))
        undo.callback(around.register_forward_pre_hook(self._note_tokens, with_kwargs=True).remove)
        undo.callback(self._router.register_forward_hook(self._note_scores).remove)
        undo.callback(module.get_submodule(name).register_forward_pre_hook(self._add, with_kwargs=True).remove)

    def _note_tokens(self, around: nn.Module, *arguments: Any) -> None:
        self._tokens = tokens_of_sample(around, arguments=arguments, option="router_losses")

    def _note_scores(self, _router: nn.Module, _given: Any, output: Any) -> None:
        """Note the scores (…, experts) in the output; Llama 4's router, whose experts get rows, returns them last."""
        found = [x for x in tensors(output) if x.is_floating_point() and x.size(-1) == self._mixture.experts]
        self._scores = found[-1 if self._mixture.form == "rows" else 0]

    @uncompiled
    def _add(self, experts: nn.Module, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Add the losses of these tokens, and let their backward begin before the experts."""
        scores, self._scores = self._scores, None
        if not (experts.training or torch.is_grad_enabled()):  # an evaluation
            return None
        if scores is None:
            raise ValueError(
                "router_losses: experts run before their router, whose scores the losses need; leave it out"
            )
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).view(-1, self._tokens, scores.size(-1))
        if self._losses.needs_shares:
            assert self._router is not None
            shares = self._router.get_buffer(SHARES).to(wide.dtype)
        else:
            chosen = chosen_experts(self._mixture, arguments=(given, named)).view(wide.shape)
            shares = self._over_tokens(chosen, function=_shares, dim=1).to(wide.dtype)
        return (self._attach(given[0], self._losses.total(wide, shares=shares)), *given[1:]), named


def _shares(chosen: Tensor) -> Tensor:
    """Return each expert's part of the choices of a sample, for each token; `chosen`: (samples, tokens, experts)."""
    counts = chosen.sum(1, keepdim=True).double()
    return (counts / counts.sum(-1, keepdim=True).clamp_min(1)).expand(chosen.shape)
