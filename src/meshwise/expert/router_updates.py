"""Update buffers of routers once a step from the tokens of each expert, add router losses, and count loads and drops.

    | buffer (experts,)           after a step
    | e_score_correction_bias     += rate · sign(mean count - count)     DeepSeek-V3, arXiv 2412.19437, section 2.1.2
    | expert_shares               = count / sum of the counts            for a balance loss over the batch

Under tp every rank counts each token: a factor that all experts share, and that changes neither signs nor shares."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.comm.api.autograd_collectives import uncompiled
from meshwise.comm.api.world import World
from meshwise.expert.router_losses import SHARES, MixtureLoss, RouterLosses, chosen_experts, module_around, router_of
from meshwise.model.find_mixtures import Mixture, find_mixtures
from meshwise.model.torch_private import in_backward

BIAS = "e_score_correction_bias"


class RouterUpdates:
    """Updates and losses of the routers of all mixtures in the modules given to `follow`.

    | losses   weights of the routers' losses
    | loss     sum of the routers' losses in this step on this rank, a scalar
    | scale    factor of the loss in the backwards of this step"""

    def __init__(self, *, rate: float, device: torch.device, losses: RouterLosses | None = None) -> None:
        """`rate`: step of the bias; 0 leaves it as it is."""
        self._rate, self._device = rate, device
        self._zeros = functools.partial(torch.zeros, dtype=torch.int64, device=device)
        self.losses = losses or RouterLosses()
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.scale = 1.0
        self._counts: list[tuple[nn.Module, tuple[str, ...], Tensor]] = []
        """Router, names of its buffers, and pairs (experts,) of each expert in this step."""
        self.loads: dict[str, Tensor] = {}
        """Tokens (experts,) that chose each expert, by mixture, on this rank, since they were last read."""
        self.drops: dict[str, Tensor] = {}
        """Dropped pairs and all pairs (2,) of each mixture with a capacity, on this rank, since they were last read."""
        self.counting: Callable[[], bool] = lambda: True
        """Function that returns False while a forward runs whose rows do not count."""
        self.active = False
        """True while the forwards and backwards of a step run."""
        self.undo = contextlib.ExitStack()
        """Callbacks that remove all hooks of mixtures, and the buffers that `prepare` has added."""
        self.close = self.undo.close

    def routers(self, module: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
        """Yield the name of each module of experts, its router, and the names of the router's buffers to update.

        A router is the module beside the experts, or the module around both, that has such a buffer."""
        for name in find_mixtures(module):
            for router in module.get_submodule(module_around(name)).modules():
                keys = tuple(key for key in (SHARES, *[BIAS] * bool(self._rate)) if key in router._buffers)
                if keys:
                    yield name, router, keys

    def prepare(self, module: nn.Module) -> None:
        """Add buffers `expert_shares` for a balance loss over the batch, and make biases buffers if there is a rate.

        ERNIE 4.5 and Laguna have biases that are parameters without gradient. Raises ValueError if the rate is below 0,
        or if there is a rate and no router of the model has a bias."""
        for name, mixture in find_mixtures(module).items():
            beside = router_of(module, name=name, experts=mixture.experts)
            needs = self.losses.needs_shares and self._device.type != "meta"
            if beside is not None and needs and SHARES not in beside._buffers:
                self.undo.callback(beside._buffers.pop, SHARES)
                dtype = torch.promote_types(beside.get_parameter("weight").dtype, torch.float32)
                beside.register_buffer(SHARES, torch.full((mixture.experts,), 1 / mixture.experts, dtype=dtype))
            for router in module.get_submodule(module_around(name)).modules() if self._rate else ():
                if BIAS in router._parameters and not router.get_parameter(BIAS).requires_grad:
                    bias = router.get_parameter(BIAS)
                    del router._parameters[BIAS]
                    router.register_buffer(BIAS, bias.detach())
        if self._rate < 0:
            raise ValueError(f"expert_bias_rate={self._rate} would move tokens to the busiest experts; give 0 or more")
        if self._rate and not any(BIAS in keys for _, _, keys in self.routers(module)):
            raise ValueError(
                f"expert_bias_rate={self._rate}: no router of {type(module).__name__} has a buffer {BIAS}. Leave the "
                "rate out, or give the router the buffer (experts,); the reference mixture has it with routing=biased"
            )

    def follow(self, module: nn.Module, *, over_tokens: Callable[..., Tensor] | None = None) -> None:
        """Count the tokens of the module's mixtures, and add the losses of their routers, by hooks.

        Call it before the experts are divided. `over_tokens`: None if this rank has all tokens of its samples."""
        mixtures = {name: one for name, one in find_mixtures(module).items() if one.form != "called"}
        totals = {name: [self._zeros(mixture.experts)] for name, mixture in mixtures.items()}
        self.loads |= {name: load for name, (load,) in totals.items()}
        for name, router, keys in self.routers(module):
            totals[name].append(self._zeros(mixtures[name].experts))
            self._counts.append((router, keys, totals[name][-1]))
        for name, mixture in mixtures.items() if self._device.type != "meta" else ():
            count = functools.partial(self._count, mixture=mixture, totals=totals[name])
            self.undo.callback(module.get_submodule(name).register_forward_pre_hook(count, with_kwargs=True).remove)
            if self.losses:
                hooks = MixtureLoss(self.losses, mixture=mixture, over_tokens=over_tokens, attach=self._attach)
                hooks.install(module, name=name, undo=self.undo)

    @property
    def _counts_now(self) -> bool:
        return self.active and self.counting() and not in_backward()

    @uncompiled
    def _count(self, _experts: nn.Module, *arguments: Any, mixture: Mixture, totals: Sequence[Tensor]) -> None:
        """Add the tokens of each expert to `totals` before the experts run on `arguments`."""
        if self._counts_now:
            chosen = chosen_experts(mixture, arguments=arguments).sum(0)
            for each in totals:
                each += chosen

    def _attach(self, x: Tensor, loss: Tensor) -> Tensor:
        """Add a loss to this step's, and return `x` with a backward that also begins at the loss."""
        if self._counts_now:
            self.loss += loss.detach()
        attached: Tensor = _Attached.apply(x, loss, self, int(self.counting()))
        return attached

    def count_drops(self, chosen: Tensor, *, dropped: Tensor, name: str) -> None:
        """Add the chosen and the dropped pairs of a mixture to its `drops`."""
        counts = self.drops.setdefault(name, self._zeros(2))
        if self._counts_now:
            counts.add_(torch.stack([(chosen & dropped).sum(), chosen.sum()]))

    def begin(self) -> None:
        """Forget all counts and losses, because a step begins."""
        self.active = True
        self.loss.zero_()
        for _, _, counts in self._counts:
            counts.zero_()

    @torch.no_grad()
    def update(self, world: World | None = None) -> None:
        """Update the buffers. `world`: the ranks of the step, which all call it."""
        if not self._counts:
            return
        total = torch.cat([counts for _, _, counts in self._counts])
        if world is not None:
            world.all_reduce(total, axes=world.mesh.others(["pp"])).wait()
        parts = total.double().split([len(counts) for _, _, counts in self._counts])
        for (router, keys, _), counts in zip(self._counts, parts, strict=True):
            for buffer, key in ((router.get_buffer(key), key) for key in keys):
                before = buffer.double().flatten()
                shares = torch.where(counts.sum() > 0, counts / counts.sum(), before)
                moved = before + self._rate * (counts.mean() - counts).sign()
                buffer.copy_((shares if key == SHARES else moved).view_as(buffer))


class _Attached(torch.autograd.Function):
    """Identity of `x`, whose backward gives `loss` the gradient `routers.scale`, or 0 if its rows do not count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _loss: Tensor, routers: RouterUpdates, weight: int) -> Tensor:
        """Return `x`; `weight`: 1 if its rows count, else 0."""
        ctx.routers, ctx.weight = routers, weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of `x` and of the loss."""
        slope = torch.full((), ctx.routers.scale * ctx.weight, dtype=torch.float64, device=gradient.device)
        return gradient, slope, None, None
