"""A multilayer perceptron: the smallest model with several blocks, for tests and for first experiments."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class MLPConfig:
    """Sizes of an MLP."""

    widths: tuple[int, ...] = (16, 64, 64, 4)
    """Features of the input, of every hidden layer and of the output: two or more."""
    bias: bool = True
    """Whether every layer adds a bias."""


class MLP(nn.Module):
    """Linear layers with GELU between them."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        pairs = zip(config.widths, config.widths[1:], strict=False)
        self.layers = nn.ModuleList(nn.Linear(wide, narrow, bias=config.bias) for wide, narrow in pairs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., widths[0]) to (..., widths[-1])."""
        for layer in self.layers[:-1]:
            x = functional.gelu(layer(x))
        output: Tensor = self.layers[-1](x)
        return output
