"""Let models of transformers compute in float64 throughout: their routers, norms and softmaxes convert to float32."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class ExactCasts(TorchFunctionMode):
    """Mode in which a conversion to float32 is one to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})
