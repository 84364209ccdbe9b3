"""Keep an exponential moving average of the parameters, as shards under every plan (`ParameterAverage`).

The average begins with the parameters before the next update, as in timm; torch's `AveragedModel` begins after it. Each
update moves it: average = decay · average + (1 - decay) · parameters, in the dtype of the masters. The average is part
of the optimizer's state: a tensor `average` for each slice. So it is saved, loaded under another plan, and counted as
memory of the optimizer. Buffers are not averaged."""

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor, nn, optim

from meshwise.data_parallel.stage_engines import Engine

AVERAGE = "average"
"""Key of the average in the optimizer's state, and last word of its slot in a checkpoint."""


class ParameterAverage:
    """Moving average of a trainer's parameters; `Trainer.average` makes it. `swapped`: True inside of `applied`."""

    def __init__(
        self,
        engine: Engine,
        *,
        optimizer: optim.Optimizer,
        decay: float,
        wait: Callable[[], None],
        publish: Callable[[], None],
    ) -> None:
        """`wait`: waits until a save under way has copied its tensors. `publish`: sends parameters to the ranks."""
        if not 0 < decay < 1:
            raise ValueError(f"average({decay}): the decay is between 0 and 1, as in average(0.999)")
        self.decay = decay
        self.swapped = False
        self._engine = engine
        self._optimizer = optimizer
        self._wait, self._publish = wait, publish
        self._before: dict[nn.Parameter, Tensor] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._keep()),
            optimizer.register_step_post_hook(lambda *_: self._move()),
        ]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the model's parameters by their averages inside the block. Every rank calls it.

        Evaluate, predict or call `state_dict` and `save_pretrained` of the trainer inside; steps, saves and loads raise
        RuntimeError. Raises RuntimeError inside of another such block."""
        if self.swapped:
            raise RuntimeError("the model has its averages already; leave the block of average.applied() first")
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def close(self) -> None:
        """Stop averaging."""
        for hook in self._hooks:
            hook.remove()

    def _slices(self) -> Iterator[nn.Parameter]:
        return (parameter for bucket in self._engine.buckets for _, parameter in bucket.slices)

    def _keep(self) -> None:
        """Keep the values of slices that have no average yet: so far these values are the average."""
        states = ((one, self._optimizer.state.get(one, {})) for one in self._slices() if one.grad is not None)
        self._before = {one: one.detach().clone() for one, state in states if AVERAGE not in state}

    def _move(self) -> None:
        for parameter in self._slices():
            state = self._optimizer.state[parameter]
            if parameter in self._before:
                state[AVERAGE] = self._before.pop(parameter)
            if AVERAGE in state:
                state[AVERAGE].lerp_(parameter.detach(), 1 - self.decay)

    def _swap(self) -> None:
        """Exchange the parameters and their average, and send the parameters to the ranks that use them."""
        self._wait()
        self._engine.world.barrier()  # ranks of a host share parameters: another rank may still read this rank's slices
        for parameter in self._slices():
            average: Tensor | None = self._optimizer.state.get(parameter, {}).get(AVERAGE)
            if average is not None:
                value = parameter.detach().clone()
                parameter.detach().copy_(average)
                average.copy_(value)
        self._publish()
        self.swapped = not self.swapped
