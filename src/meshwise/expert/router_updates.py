"""Update buffers of routers once a step, from the tokens that each expert got in the whole global batch.

    | buffer (experts,)           after a step
    | e_score_correction_bias     += rate · sign(mean count - count)     DeepSeek-V3, arXiv 2412.19437, section 2.1.2
    | expert_shares               = count / sum of the counts            for a balance loss over the batch

The counts of all micro-batches and ranks are summed by one all-reduce a step, for all layers of a rank together. Under
tp every rank counts each token. This factor is the same for all experts, so it changes neither signs nor shares."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.model.find_mixtures import find_mixtures
from meshwise.model.torch_private import in_backward

BIAS, SHARES = "e_score_correction_bias", "expert_shares"


class RouterUpdates:
    """Updates of the routers of all mixtures in the modules given to `follow`."""

    def __init__(self, *, rate: float, device: torch.device) -> None:
        """`rate`: step of the bias; 0 leaves it as it is."""
        self._rate, self._device = rate, device
        self._counts: list[tuple[nn.Module, tuple[str, ...], Tensor]] = []
        """Router, names of its buffers, and pairs (experts + 1,) of each expert in this step; last, dropped pairs."""
        self.drops: dict[str, Tensor] = {}
        """Dropped pairs and all pairs (2,) of each mixture with a capacity, on this rank, since they were last read."""
        self.counting: Callable[[], bool] = lambda: True
        """Function that returns False while a forward runs whose rows do not count."""

    def routers(self, module: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
        """Yield the name of each module of experts, its router, and the names of the router's buffers to update.

        A router is the module beside the experts, or the module around both, that has such a buffer."""
        for name in find_mixtures(module):
            for router in module.get_submodule(name.rpartition(".")[0]).modules():
                keys = tuple(key for key in (SHARES, *[BIAS] * bool(self._rate)) if key in router._buffers)
                if keys:
                    yield name, router, keys

    def prepare(self, module: nn.Module) -> None:
        """Turn biases that are parameters without gradient (ERNIE 4.5, Laguna) into buffers, if there is a rate.

        Raises ValueError if the rate is below 0, or if there is a rate and no router of the model has a bias."""
        for name in find_mixtures(module) if self._rate else ():
            for router in module.get_submodule(name.rpartition(".")[0]).modules():
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

    def follow(self, module: nn.Module) -> None:
        """Count the tokens of the module's mixtures, by hooks. Call it before the experts are divided."""
        for name, router, keys in self.routers(module):
            counts = torch.zeros(router.get_buffer(keys[0]).numel() + 1, dtype=torch.int64, device=self._device)
            self._counts.append((router, keys, counts))

            def count(experts: nn.Module, given: Any, named: Any, *, counts: Tensor = counts) -> None:
                if experts.training and self.counting() and not in_backward():
                    tensors = (each for each in (*given, *named.values()) if isinstance(each, Tensor))
                    index = next(each for each in tensors if not each.is_floating_point()).flatten()
                    counts.index_add_(0, index, torch.ones_like(index))

            module.get_submodule(name).register_forward_pre_hook(count, with_kwargs=True)

    def drop_counter(self, name: str) -> Callable[[nn.Module, Tensor, Tensor], None]:
        """Return a function that adds to `drops` of a mixture; it gets its experts, chosen and dropped pairs."""
        counts = self.drops[name] = torch.zeros(2, dtype=torch.int64, device=self._device)

        def count(experts: nn.Module, chosen: Tensor, dropped: Tensor) -> None:
            if experts.training and self.counting() and not in_backward():
                counts.add_(torch.stack([(chosen & dropped).sum(), chosen.sum()]))

        return count

    def begin(self) -> None:
        """Forget all counts, because a step begins."""
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
        for (router, keys, _), counted in zip(self._counts, parts, strict=True):
            counts = counted[:-1]
            for buffer, key in ((router.get_buffer(key), key) for key in keys):
                before = buffer.double().flatten()
                shares = torch.where(counts.sum() > 0, counts / counts.sum(), before)
                moved = before + self._rate * (counts.mean() - counts).sign()
                buffer.copy_((shares if key == SHARES else moved).view_as(buffer))
