"""Options of the optimizer for each parameter: by patterns over names, by depth, and by kind (`parameter_rule`).

`Several` runs several optimizers at once, each for its own parameter groups, as in docs/large_batch.md. `hidden` are
the matrices of the model except its embeddings and its head, as `hidden_matrices` finds them. For another division,
pass `Options(parameter_options=…)`, a function that returns {"optimizer": "hidden"} for a parameter."""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from meshwise.model.parameter_table import ParameterOptions, all_names, matrices_decay
from meshwise.model.parameter_units import partition
from meshwise.model.whole_parameters import LogicalTensors
from meshwise.optim.build_optimizer import OptimizerClass, build_optimizer, needs_of


def parameter_rule(
    module: nn.Module,
    *,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    several: bool = False,
    lr: Mapping[str, float] | None = None,
    layer_decay: float = 1.0,
) -> ParameterOptions:
    """Return a rule for `Options.parameter_options`. Vectors get no weight decay, unless a pattern says otherwise.

    | groups        options by pattern: {"blocks.*.bias": {"lr": 1e-4}}. `*` matches any text, and later patterns win
    | several       True: for `Several`. Each parameter has an `optimizer`: `hidden` for `hidden_matrices`, else `rest`
    | lr            rate by optimizer ("" without `several`); used with `layer_decay`
    | layer_decay   factor of the rate for each block from a parameter to the output (Clark et al., arXiv 2003.10555)

    Raises ValueError for a pattern that matches no parameter."""
    names = all_names(module)
    known = [name for own in names.values() for name in own]
    for pattern in groups or {}:
        if not fnmatch.filter(known, pattern):
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
            raise ValueError(f"no parameter matches the pattern {pattern!r}; near names: {', '.join(near)}")
    hidden, powers = hidden_matrices(module), layer_decay_exponents(module)
    found: dict[str, Mapping[str, Any]] = {}
    for parameter, own in names.items():
        options = dict(matrices_decay(own[0], parameter))
        if several:
            options["optimizer"] = "hidden" if own[0] in hidden else "rest"
        for pattern, changes in (groups or {}).items():
            if fnmatch.filter(own, pattern):
                options |= changes
        if layer_decay != 1.0:
            base = options["lr"] if "lr" in options else (lr or {})[options.get("optimizer", "")]
            options["lr"] = base * layer_decay ** powers[own[0]]
        found |= dict.fromkeys(own, options)
    return lambda name, _: found[name]


def hidden_matrices(module: nn.Module) -> frozenset[str]:
    """Return the names of parameters of two or more dims, except embeddings and the last `nn.Linear` (the head)."""
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    others = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    without = {part.weight for part in [*others, *linear[-1:]]}
    return frozenset(name for name, p in module.named_parameters() if p.ndim > 1 and p not in without)


def layer_decay_exponents(module: nn.Module) -> Mapping[str, int]:
    """Return the exponent of `layer_decay` for each parameter, by name.

    It is 0 after the last block, 1 in the last block, 2 in the block before, …, and largest before the first block."""
    depths: dict[str, tuple[int, bool]] = {}
    depth = 0
    places = {name: place for place, (name, _) in enumerate(module.named_modules())}
    for piece in sorted((piece for unit in partition(module) for piece in unit), key=lambda one: places[one.module]):
        depth += piece.block
        for name in piece.parameters:
            depths.setdefault(name, (depth, piece.block))
    return {name: 0 if own == depth and not block else depth + 1 - own for name, (own, block) in depths.items()}


Optimizers = Mapping[str, tuple[OptimizerClass, Mapping[str, Any]]]
"""Class and keyword arguments of each optimizer, by a name."""


class Several(torch.optim.Optimizer):
    """Optimizers that share one list of groups and one state; each group names its optimizer by the key `optimizer`.

    Raises ValueError for a group with an unknown name, and for an optimizer with `needs = "replicas"`."""

    needs = "matrices"

    def __init__(self, params: Iterable[Any], *, logical: LogicalTensors, optimizers: Optimizers) -> None:
        super().__init__(params, {})
        for group in self.param_groups:
            if (name := group.get("optimizer")) not in optimizers:
                raise ValueError(
                    f"a parameter group has optimizer={name!r}, and there are {', '.join(optimizers)}; let "
                    f'parameter_options return {{"optimizer": "{next(iter(optimizers), "")}"}} for its parameters'
                )
        self.name = " and ".join(kind.__name__ for kind, _ in optimizers.values())
        self._optimizers = []
        for name, (kind, arguments) in optimizers.items():
            if needs_of(kind) == "replicas":
                raise ValueError(f"{kind.__name__} keeps gradients of replicas apart; use it as the only optimizer")
            if own := [group for group in self.param_groups if group["optimizer"] == name]:
                optimizer = build_optimizer(kind, groups=own, logical=logical, **arguments)
                self.state.update(optimizer.state)
                optimizer.param_groups, optimizer.state = own, self.state
                self._optimizers.append(optimizer)

    @staticmethod
    def parameter_options(module: nn.Module) -> ParameterOptions:
        """Return the default division of a model's parameters: `hidden` and `rest`."""
        return parameter_rule(module, several=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - no closure under a plan
        """Let each optimizer update its parameters. Every rank calls this method."""
        for optimizer in self._optimizers:
            optimizer.step()
