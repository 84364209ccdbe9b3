"""Choose the dtypes of a training: for storage, computation, gradients, updates and buffers.

They follow from `precision` and `wire` of the plan and from nothing else in it. docs/precision.md has the table of
dtypes. `Trainer.precision` reports the dtypes that the tensors of a rank really have.

The parameters are stored in the dtype of the computation, and fp32 masters are updated next to them (Micikevicius et
al., "Mixed Precision Training", arXiv 1710.03740). Megatron-LM and FSDP2 do the same. `precision/dtype_conversion.py`
gives activations their dtype."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from meshwise.plan import Plan


@dataclass(frozen=True)
class Precision:
    """Dtypes of a training; each field is a row of the table in docs/precision.md.

    None means the `fp32` column of the table. Complex and integer parameters keep their declared dtype. Raises
    ValueError when `parameters` is bf16 or fp16 and `compute` is another dtype."""

    parameters: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduction: torch.dtype | None = None
    accumulation: torch.dtype | None = None
    master: torch.dtype | None = None
    buffers: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.parameters in NARROW and self.compute not in (None, self.parameters):
            raise ValueError(
                f"parameters={self.parameters} compute={self.compute}: half-precision parameters are computed in "
                f"their own dtype; give parameters={self.compute}"
            )

    @property
    def computes(self) -> torch.dtype | None:
        """Dtype of matrix products; None for the dtype that the model declares."""
        return self.compute or self.parameters

    @property
    def needs_loss_scale(self) -> bool:
        """True if some of the training is in fp16, where gradients underflow without a loss scale."""
        return torch.float16 in (self.parameters, self.compute, self.reduction)

    def master_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the master and of the optimizer state, for a parameter of dtype `dtype`."""
        if self.master is not None and dtype.is_floating_point:
            return self.master
        return dtype if dtype.itemsize >= 4 else torch.float32

    def accumulation_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a parameter of dtype `dtype` are accumulated."""
        return self.accumulation if self.accumulation and dtype.is_floating_point else self.master_of(dtype)

    def reduction_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a parameter of dtype `dtype` are sent and reduced."""
        return self.reduction if self.reduction and dtype.is_floating_point else self.accumulation_of(dtype)


NARROW = (torch.bfloat16, torch.float16)
"""The half-precision dtypes, which need fp32 masters."""

PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(parameters=torch.bfloat16, compute=torch.bfloat16, reduction=torch.bfloat16),
    "fp16": Precision(parameters=torch.float16, compute=torch.float16, reduction=torch.float16),
}
"""Dtypes for each value of `precision` in a plan, before `wire` changes the reduction."""

KINDS = ("parameters", "compute", "reduction", "accumulation", "master", "optimizer_state", "buffers")
"""Kinds of tensors in the report `Trainer.precision`, in its order."""

NO_DTYPE = "none"
"""Text that replaces the dtype in the report when a rank has no tensors of a kind."""

WIRES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype in which gradients are sent, for each value of `wire` in a plan except `auto`."""


def precision_of(plan: Plan) -> Precision:
    """Return the dtypes for `precision` and `wire` of a plan; a codec gets gradients in the dtype of accumulation."""
    record = PRECISIONS[plan.precision]
    return record if plan.wire == "auto" else replace(record, reduction=WIRES.get(plan.wire))


def dtype_names(found: Mapping[str, Iterable[torch.dtype]]) -> dict[str, str]:
    """Return, for each of KINDS, the sorted names of the dtypes in `found`, joined by spaces; NO_DTYPE for none."""
    names = {kind: sorted({str(dtype).removeprefix("torch.") for dtype in found.get(kind, ())}) for kind in KINDS}
    return {kind: " ".join(dtypes) or NO_DTYPE for kind, dtypes in names.items()}
