"""Two optimizers that need norms or whole tensors, written as a user would write them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.model.whole_parameters import LogicalTensors


class _Whole(torch.optim.Optimizer):
    """Steps by `lr`, and keeps a momentum of the shape of each slice."""

    def __init__(self, params: Iterable[Any], *, logical: LogicalTensors, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.logical = logical

    def momenta(self) -> dict[nn.Parameter, Tensor]:
        found = {}
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                found[p] = state["momentum"].clone()
        return found


class Normed(_Whole):
    """LARS without its constants: a step as long as `lr` times the parameter, along the momentum."""

    needs = "norms"

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        momenta = self.momenta()
        lengths = self.logical.squared_norms({p: p.detach() for p in momenta})
        squares = self.logical.squared_norms(momenta)
        for group in self.param_groups:
            for p in group["params"]:
                for part in self.logical.parts(p):
                    here = slice(part.start, part.stop)
                    ratio = (lengths[part.name] / squares[part.name].clamp_min(1e-30)).sqrt().to(p.dtype)
                    values = p.view(-1)
                    values[here] -= group["lr"] * (
                        ratio * momenta[p].view(-1)[here] + group["weight_decay"] * values[here]
                    )


class Orthogonal(_Whole):
    """Muon with an exact polar factor: U Vᵀ of the momentum of each matrix; other shapes by their sign."""

    needs = "matrices"

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        momenta = self.momenta()
        self.logical.map_whole(momenta, groups=self.param_groups, function=self.orthogonal)
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * momenta[p].view_as(p)

    @staticmethod
    def orthogonal(_name: str, momentum: Tensor) -> Tensor:
        if momentum.dim() != 2:
            return torch.div(momentum, momentum.norm() + 0.1)
        u, s, vh = torch.linalg.svd(momentum, full_matrices=False)
        return torch.einsum("ik,k,kj->ij", u, s / (s + 0.1), vh)


class Undeclared(Normed):
    """One that says something else."""

    needs = "everything"
