"""The dtypes of safetensors, by their names in the format (https://huggingface.co/docs/safetensors)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)

_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the safetensors format. Raises ValueError for one that it does not have."""
    if dtype not in _NAMES:
        raise ValueError(f"safetensors has no {dtype}; it has {', '.join(str(known) for known in _NAMES)}")
    return _NAMES[dtype]
