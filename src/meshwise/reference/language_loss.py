"""The cross-entropy of a language model as a sum and a count, which the engine divides once over the global batch."""

from torch import Tensor
from torch.nn import functional

IGNORED = -100
"""Target that marks a token without loss, as in torch's cross-entropy."""


def next_token_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy in nats, summed over the targets, and the number of targets: two scalar tensors.

    `logits` is (..., vocabulary). `batch` is (inputs, targets) with integer targets (...). Targets of -100 are ignored.
    Logits narrower than fp32 are converted to fp32. Raises TypeError if the model returned no tensor, and ValueError if
    the shapes of targets and logits differ in other dims than the vocabulary."""
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model returned a {type(logits).__name__}, but this loss takes a tensor of logits; name a loss "
            "of your own, loss(output, batch): loss = 'my_module:my_loss' in a job"
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
