"""The dtypes of a training: what a model is stored, computed, accumulated, reduced and updated in.

Seven dtypes are decided here in one value, the same under every plan. The trainer prints it next to the dtypes that its
tensors have.

    |                 fp32          bf16        fp16
    | parameters      as declared   bfloat16    float16      what the model uses; under zero=3 what is gathered
    | compute         as declared   bfloat16    float16      products and what is saved for the backward
    | reduction       as updated    bfloat16    float16      what gradients travel in; `wire=fp32`: float32
    | accumulation    as updated    float32     float32      where the gradients of micro-batches are added up
    | master          at least float32                       what the optimizer updates, of the unrounded parameters
    | optimizer state as updated                             torch's optimizers keep it in the dtype of what they update
    | buffers         as declared                            statistics and rotary tables lose too much when rounded

The parameters are stored in the dtype of the computation, and fp32 masters are updated next to them, as in Megatron-LM
and FSDP2's mixed precision (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740). Gathers and activations
are half as large, and no use of a parameter converts it. `conversion` says how activations get their dtype.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from meshwise.plan import Plan


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training. None: as the table above says for `fp32`.

    Complex and integer parameters stay as they are declared. Raises ValueError when half-precision parameters are to be
    computed in another dtype.
    """

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
        """Dtype of matrix products; None: as the model declares."""
        return self.compute or self.parameters

    @property
    def scaled(self) -> bool:
        """True if gradients underflow without a loss scale."""
        return torch.float16 in (self.parameters, self.compute, self.reduction)

    def master_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter of this dtype is updated, and in which its optimizer state is kept."""
        if self.master is not None and dtype.is_floating_point:
            return self.master
        return dtype if dtype.itemsize >= 4 else torch.float32

    def accumulation_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a parameter of this dtype are accumulated."""
        return self.accumulation if self.accumulation and dtype.is_floating_point else self.master_of(dtype)

    def reduction_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a parameter of this dtype are reduced."""
        return self.reduction if self.reduction and dtype.is_floating_point else self.accumulation_of(dtype)


NARROW = (torch.bfloat16, torch.float16)
"""The half-precision dtypes, which need fp32 masters."""

RECORDS: Mapping[str, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(parameters=torch.bfloat16, compute=torch.bfloat16, reduction=torch.bfloat16),
    "fp16": Precision(parameters=torch.float16, compute=torch.float16, reduction=torch.float16),
}
"""The dtypes of each `precision` of a plan."""

KINDS = ("parameters", "compute", "reduction", "accumulation", "master", "optimizer_state", "buffers")
"""The kinds of tensors that `Trainer.precision` reports the dtypes of."""

NO_DTYPE = "none"
"""In place of a dtype, for a rank without tensors of a kind."""

WIRES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision_of(plan: Plan) -> Precision:
    """Return the dtypes that a plan states."""
    record = RECORDS[plan.precision]
    return record if plan.wire == "auto" else replace(record, reduction=WIRES[plan.wire])


def dtype_names(found: Mapping[str, Iterable[torch.dtype]]) -> dict[str, str]:
    """Return the names of the dtypes of every kind, or NO_DTYPE."""
    names = {kind: sorted({str(dtype).removeprefix("torch.") for dtype in found.get(kind, ())}) for kind in KINDS}
    return {kind: " ".join(dtypes) or NO_DTYPE for kind, dtypes in names.items()}
