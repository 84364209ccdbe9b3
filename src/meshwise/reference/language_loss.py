"""The cross-entropy of a language model as a sum and a count, which the engine divides once over the global batch."""

from torch import Tensor
from torch.nn import functional

IGNORED = -100


def next_token_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy in nats, summed over the targets, and the number of targets: two scalar tensors.

    `logits` is (..., vocabulary); `batch` is (inputs, targets), targets (...) integer. Targets of -100 are ignored. The
    logits are widened to at least fp32. Raises TypeError when the model returned no tensor, ValueError when targets
    and logits differ in shape, the vocabulary aside.
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
