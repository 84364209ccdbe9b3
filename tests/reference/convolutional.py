"""A ResNet and a U-Net as small as they come, with what makes them hard to cut: shortcuts, skips over half of a model,
changes in place, pooling and upsampling between the layers, a parameter that no layer holds."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Norm = Callable[[int], nn.Module]


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


class Residual(nn.Module):
    """A ResNet's basic block."""

    def __init__(self, wide: int, wider: int, *, norm: Norm) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(wide, wider, 3, padding=1), nn.Conv2d(wider, wider, 3, padding=1)
        self.norm1, self.norm2 = norm(wider), norm(wider)
        self.shortcut = nn.Conv2d(wide, wider, 1) if wide != wider else nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(self.act(self.norm1(self.first(x)))))
        y += self.shortcut(x)
        out: Tensor = self.act(y)
        return out


class ResNet(nn.Module):
    """Images (B, 3, H, W) to logits of five classes; `blocks` of each of two widths."""

    def __init__(self, blocks: int = 2, *, norm: Norm = group_norm) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm(4), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(*(Residual(4, 4, norm=norm) for _ in range(blocks)))
        self.layer2 = nn.Sequential(*(Residual(4 if k == 0 else 8, 8, norm=norm) for k in range(blocks)))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        logits: Tensor = self.head(x.mean((-2, -1)))
        return logits


class UNet(nn.Module):
    """Images (B, 3, H, W), H and W multiples of four, to images; `mask` and `flip` as a caller likes."""

    def __init__(self, *, norm: Norm = group_norm) -> None:
        super().__init__()
        self.down1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), norm(4)
        self.down2 = nn.Conv2d(4, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up2 = nn.Conv2d(16, 4, 3, padding=1)
        self.up1 = nn.Conv2d(8, 3, 3, padding=1)
        self.scale = nn.Parameter(torch.full((3, 1, 1), 0.7))
        self.act = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x: Tensor, mask: Tensor | None = None, flip: bool = False) -> Tensor:
        a = self.act(self.norm1(self.down1(x)))
        b = self.act(self.down2(functional.max_pool2d(a, 2)))
        c = self.act(self.middle(functional.max_pool2d(b, 2)))
        c = self.act(self.up2(torch.cat((functional.interpolate(c, scale_factor=2.0), b), 1)))
        y: Tensor = self.up1(torch.cat((functional.interpolate(c, scale_factor=2.0), a), 1)) * self.scale
        y = y.flip(-1) if flip else y
        return y if mask is None else y * mask
