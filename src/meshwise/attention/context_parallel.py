"""Split the tokens of every sequence over the ranks of `cp`, without a change to model or loss (`ContextParallel`).

A micro-batch enters the forward with all tokens. Here it is cut to this rank's tokens, and the model and the loss run
under `TokenInterception`. Each rank returns (sum, count) of its own tokens, and parameters are replicas over `cp`, so
the engine does the rest."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from meshwise.attention.mask_pattern import Pattern
from meshwise.attention.token_attention import ORDER_OF, TokenAttention, context_world
from meshwise.attention.token_interception import TokenInterception
from meshwise.attention.token_rules import install_rules, token_rules
from meshwise.attention.token_state import HEADS, RING, TokenState, packed_documents, rank_order, sequence_length
from meshwise.attention.transformers_attention import use_attend
from meshwise.comm.api.world import World
from meshwise.plan import Plan


class ContextParallel:
    """Tokens of one rank under a plan: cuts batches, and runs the model's attentions over all tokens."""

    def __init__(
        self, plan: Plan, *, world: World, rules: Mapping[str, Pattern | None] | None = None, dense: bool = False
    ) -> None:
        """`rules`: as `token_rules` returns them. `dense`: attention under a rule is torch's, with a mask.

        Raises PlanError when `cp_heads` does not divide `cp`."""
        self._world = context_world(world, plan=plan)
        self._splits = plan.cp > 1
        self._order = ORDER_OF.get(plan.context, "zigzag")
        self._rules = rules or {}
        self._names: dict[nn.Module, str] = {}
        self.attention = TokenAttention(self._world, plan.context, dense)
        self.mode = TokenInterception(self.attention)

    @classmethod
    def of(cls, plan: Plan, *, world: World, rules: Mapping[str, str] | None) -> "ContextParallel | None":
        """Return the tokens under a plan and the rules of a run; None if neither concerns tokens."""
        found = token_rules(rules)
        return cls(plan, world=world, rules=found) if plan.cp > 1 or found else None

    def install(self, module: nn.Module) -> Callable[[], None]:
        """Let the models of transformers in `module` call this attention, and register the hooks of the rules.

        Return a function that undoes both."""
        self._names = {one: name for name, one in module.named_modules()}
        undo = contextlib.ExitStack()
        undo.callback(use_attend(module))
        undo.callback(install_rules(module, rules=self._rules, mode=self.mode, attention=self.attention))
        return undo.close

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
            packed = self.attention.context == "auto" and packed_documents(batch) is not None
            order = rank_order("striped" if packed else self._order, length=length, ring=ring.size, heads=heads.size)
            state = TokenState(self._world, length, order, ring.index * heads.size + heads.index, self._names)
            state.take_batch(batch)
            self.mode.state = state
        return state.cut
