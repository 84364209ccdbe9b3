"""Hooks that are put on a model when it is in stages already."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from meshwise.model.deferred_init import ParameterSource
from meshwise.model.parameter_hooks import hooks_on
from meshwise.pipeline.cut.model_cut import ModelCut
from meshwise.pipeline.cut.module_hooks import GLOBAL, are_global, around, has_backward_hooks
from meshwise.plan import PlanError

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class LateHooks:
    """Detects hooks that were added or removed after the cut, where the stages do not know them.

    The stages have copies of the modules that were given. A parameter's hooks are carried along, those that are taken
    off later too, so that only the first ones can be missed. A model that was built here has no other owner.
    """

    def __init__(self, source: ParameterSource, *, stages: Collection[nn.Module], cut: ModelCut) -> None:
        cut_through = around(cut.modules).union(cut.modules) - {""}
        given = () if source.deferred else tuple(source.module.named_modules())
        self._given = [(name, held, tuple(held)) for name, module in given for held in _held(module)]
        parameters = () if source.deferred else tuple(source.module.named_parameters())
        self._parameters = [(name, parameter) for name, parameter in parameters if not hooks_on(parameter)]
        self._bare = [
            (name, module)
            for stage in stages
            for name, module in stage.named_modules()
            if name in cut_through and not has_backward_hooks(module)
        ]

    def refuse(self) -> None:
        """Raise PlanError where there were."""
        changed = (name for name, held, keys in self._given if len(held) != len(keys) or tuple(held) != keys)
        hooked = (name for name, parameter in self._parameters if hooks_on(parameter))
        for name in (*changed, *hooked):
            raise PlanError(
                f"hooks of {name or 'the model'} were registered or removed after it was cut into stages, which are "
                "copies. Change hooks before parallelize, or on trainer.model"
            )
        for name, module in self._bare:
            if has_backward_hooks(module):
                raise PlanError(
                    f"a backward hook was registered on {name} of a stage, which may send values from inside it; "
                    "register it before parallelize, on the original model"
                )
        if are_global():
            raise PlanError(GLOBAL)


def _held(module: nn.Module) -> Iterator[Mapping[int, Any]]:
    yield from (vars(module)[kind] for kind in _KINDS)
