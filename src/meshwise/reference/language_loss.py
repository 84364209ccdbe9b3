"""The loss of a language model as meshwise wants every loss: a sum and a count, so that the engine divides once."""

from torch import Tensor
from torch.nn import functional

IGNORED = -100


def next_token_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, summed over the targets that count, and how many count.

    `logits` is (..., vocabulary); `batch` is (inputs, targets), targets (...) integer; a target of -100 counts for
    nothing. The logits are widened to at least fp32. Returns two scalars: (sum, count), with count an integer tensor.
    Raises TypeError when the model returned no tensor, ValueError when the targets' shape is not the logits' without
    the vocabulary.
    """
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model returned a {type(logits).__name__}, and this loss takes a tensor of logits; name a loss of "
            "your own, loss(output, batch): loss = 'my_module:my_loss' in a job"
        )
    targets = batch[1]
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need targets of shape {tuple(logits.shape[:-1])}, "
            f"not {tuple(targets.shape)}"
        )
    scores = logits.flatten(0, -2)
    if scores.element_size() < 4:
        scores = scores.float()
    total = functional.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()
