"""Keep an exponential moving average of the parameters beside the optimizer's state, as shards under every plan.

After the first update the average is a copy of the parameters. Each later update moves it: average = decay · average +
(1 - decay) · parameters, in the dtype of the masters. These are the numbers of torch's `AveragedModel` with
`get_ema_multi_avg_fn(decay)`. The average is state of the optimizer, of the shape of each slice, under the key
`average`. So it is saved, loaded under another plan, and counted as memory of the optimizer. Buffers are not averaged.
"""

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor, nn, optim

from meshwise.data_parallel.staged_engine import Engine

AVERAGE = "average"
"""Key of the average in the optimizer's state, and last word of its slot in a checkpoint."""


class ParameterAverage:
    """Average of a trainer's parameters; `Trainer.average` makes it. `swapped`: True inside of `applied`."""

    def __init__(self, engine: Engine, *, optimizer: optim.Optimizer, decay: float, wait: Callable[[], None]) -> None:
        """`wait`: waits until a save under way has copied its tensors."""
        if not 0 < decay < 1:
            raise ValueError(f"average({decay}): the decay is between 0 and 1, as in average(0.999)")
        self.decay = decay
        self.swapped = False
        self._engine = engine
        self._optimizer = optimizer
        self._wait = wait
        self._hook = optimizer.register_step_post_hook(lambda *_: self._move())

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averaged parameters inside the block. Every rank calls it.

        Evaluate, predict or call `state_dict` and `save_pretrained` of the trainer inside; steps, saves and loads raise
        RuntimeError. Raises RuntimeError before the first update."""
        if self.swapped or not all(AVERAGE in self._optimizer.state.get(slice_, {}) for slice_ in self._slices()):
            raise RuntimeError("the average begins with the first update; train a step, or load a checkpoint with it")
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def close(self) -> None:
        """Stop averaging."""
        self._hook.remove()

    def _slices(self) -> Iterator[nn.Parameter]:
        return (parameter for bucket in self._engine.buckets for _, parameter in bucket.slices)

    def _move(self) -> None:
        for parameter in self._slices():
            state, value = self._optimizer.state[parameter], parameter.detach()
            if AVERAGE in state:
                state[AVERAGE].lerp_(value, 1 - self.decay)
            else:
                state[AVERAGE] = value.clone()

    def _swap(self) -> None:
        """Exchange the parameters and their average, and send the parameters to the ranks that use them."""
        self._wait()
        self._engine.world.barrier()  # ranks of a host share parameters: another rank may still read this rank's slices
        for parameter in self._slices():
            average: Tensor = self._optimizer.state[parameter][AVERAGE]
            value = parameter.detach().clone()
            parameter.detach().copy_(average)
            average.copy_(value)
        self._engine.publish()
        self.swapped = not self.swapped


def drop_average(optimizer: optim.Optimizer) -> None:
    """Remove an average that a checkpoint had and that no update has moved since."""
    for state in optimizer.state.values():
        state.pop(AVERAGE, None)
