"""Models of transformers that compute in float64 throughout."""

import pytest
from torch import nn

from meshwise.tensor.families.norm import as_norm


def with_exact_norms(model: nn.Module) -> nn.Module:
    """With torch's RMSNorm for these models' own. Theirs computes in float32, whatever it is given, so that sums that
    are split differently differ by that.
    """
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")):
            width, norm = as_norm(module) or pytest.fail(f"{name} is no norm")
            assert not norm.centred
            model.set_submodule(name, nn.RMSNorm(width, eps=norm.epsilon))
    return model
