import pytest
import torch

from meshwise.reference import next_token_loss


def test_the_loss_is_a_sum_over_the_targets_that_are_not_ignored() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[0, -100, 4], [2, 2, -100]])
    total, count = next_token_loss(logits, (targets, targets))
    logs = logits.log_softmax(-1)
    expected = -(logs[0, 0, 0] + logs[0, 2, 4] + logs[1, 0, 2] + logs[1, 1, 2])
    assert count == 4
    torch.testing.assert_close(total, expected)


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    logits, targets = torch.randn(4, 3, 5, dtype=torch.float64), torch.randint(0, 5, (4, 3))
    whole, count = next_token_loss(logits, (targets, targets))
    parts = [next_token_loss(logits[rows], (targets[rows], targets[rows])) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole)
    assert parts[0][1] + parts[1][1] == count


def test_nothing_to_predict_is_a_loss_of_zero() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    total, count = next_token_loss(logits, (torch.zeros(2), torch.full((2,), -100)))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert logits.grad is not None
    assert not logits.grad.any()


def test_half_precision_logits_are_widened() -> None:
    logits, targets = torch.randn(64, 100).bfloat16(), torch.randint(0, 100, (64,))
    total, _ = next_token_loss(logits, (targets, targets))
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, next_token_loss(logits.float(), (targets, targets))[0])


def test_targets_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"need targets of shape \(2, 3\), not \(2, 4\)"):
        next_token_loss(torch.zeros(2, 3, 5), (torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.long)))
