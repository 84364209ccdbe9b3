"""The reference run is the loop one would write by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.engine.parallelize import Options
from meshwise.testing import ReferenceRun, alone


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def test_the_reference_run_equals_a_loop_by_hand_bit_for_bit() -> None:
    model, batches = net(), [torch.randn(5, 3, dtype=torch.float64) for _ in range(3)]
    by_hand = copy.deepcopy(model)
    decayed = [p for p in by_hand.parameters() if p.ndim > 1]
    others = [p for p in by_hand.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    steps = alone(model, loss=squares, batches=batches, options=Options(clip_norm=0.3), lr=0.1)
    for batch, step in zip(batches, steps, strict=True):
        optimizer.zero_grad()
        loss = by_hand(batch).square().sum() / 5
        loss.backward()
        assert (step["loss"], step["tokens"]) == (loss.item(), 5)
        gradients = {name: p.grad for name, p in by_hand.named_parameters() if p.grad is not None}
        assert all(torch.equal(step["gradients"][name], gradients[name]) for name, _ in by_hand.named_parameters())
        assert step["grad_norm"] == nn.utils.clip_grad_norm_(by_hand.parameters(), 0.3).item()
        optimizer.step()
        assert all(torch.equal(step["parameters"][name], p) for name, p in by_hand.named_parameters())


def test_a_module_is_left_as_it_was_and_a_function_gives_the_same_model_for_the_same_seed() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    alone(model, loss=squares, batches=[torch.randn(2, 3, dtype=torch.float64)], lr=0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    one, same, other = (ReferenceRun(net, loss=squares, options=Options(seed=seed), lr=0.1).model for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_parameter_that_the_loss_does_not_reach_decays() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Any:
            return self.used(x)

    model = Unused()
    (step,) = alone(model, loss=squares, batches=[torch.randn(2, 3)], lr=0.1, weight_decay=0.5)
    assert torch.equal(step["gradients"]["unused.weight"], torch.zeros(1, 3))
    assert torch.allclose(step["parameters"]["unused.weight"], model.unused.weight * 0.95)
    assert torch.equal(step["parameters"]["unused.bias"], model.unused.bias)


def test_a_bf16_parameter_is_updated_in_fp32_and_rounded() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    batch = torch.ones(1, 1, dtype=torch.bfloat16)
    single = ReferenceRun(model, loss=lambda output, _: (output.sum(), 1), optimizer=torch.optim.SGD, lr=2**-11)
    values = []
    for _ in range(8):
        single.backward(batch)
        single.update()
        values.append(float(dict(single.parameters())["weight"]))
    assert values == [1.0] * 4 + [1 - 2**-8] * 4  # one update is less than half of the last place; eight are not


def test_a_loss_that_counts_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="counted nothing"):
        alone(net, loss=lambda output, _: (output.sum(), 0), batches=[torch.randn(2, 3).double()], lr=0.1)
