"""Models of transformers that compute in float64 throughout."""

from torch import nn


def with_exact_norms(model: nn.Module) -> nn.Module:
    """With torch's RMSNorm for these models' own. Theirs computes in float32, whatever it is given, so that sums that
    are split differently differ by that."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")) and not isinstance(module, nn.RMSNorm):
            width = module.get_parameter("weight").numel()
            model.set_submodule(name, nn.RMSNorm(width, eps=vars(module)["variance_epsilon"]))
    return model
