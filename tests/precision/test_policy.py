"""One record says every dtype; a plan's words are records."""

import pytest
import torch

from meshwise.plan import Plan, PlanError
from meshwise.precision.dtype_policy import Precision, precision_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    "plan, declared, row",
    [  #                             reduction accumulation master
        ("dp=1", FP32, (FP32, FP32, FP32)),
        ("dp=1", FP64, (FP64, FP64, FP64)),
        ("dp=1", BF16, (FP32, FP32, FP32)),
        ("dp=1", torch.complex64, (torch.complex64, torch.complex64, torch.complex64)),
        ("precision=bf16", BF16, (BF16, FP32, FP32)),
        ("precision=bf16 wire=fp32", BF16, (FP32, FP32, FP32)),
        ("precision=fp16", FP16, (FP16, FP32, FP32)),
        ("wire=bf16", FP32, (BF16, FP32, FP32)),
        ("wire=bf16", torch.complex64, (torch.complex64, torch.complex64, torch.complex64)),
    ],
)
def test_every_dtype_follows_from_the_plan_and_the_parameter(
    plan: str, declared: torch.dtype, row: tuple[torch.dtype, ...]
) -> None:
    record = precision_of(Plan.parse(plan))
    assert (record.reduction_of(declared), record.accumulation_of(declared), record.master_of(declared)) == row


def test_only_fp16_needs_a_loss_scale() -> None:
    scaled = [
        text for text in ("fp32", "bf16", "fp16") if precision_of(Plan.parse(f"precision={text}")).needs_loss_scale
    ]
    assert scaled == ["fp16"]
    assert precision_of(Plan.parse("wire=fp16")).needs_loss_scale


def test_a_record_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match=r"computed in their own dtype; give parameters=torch\.float16"):
        Precision(parameters=BF16, compute=FP16)
    with pytest.raises(PlanError, match="Nearest that works: 'precision=bf16'"):
        Plan.parse("precision=bf6")
