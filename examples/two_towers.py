"""Train two towers that live on different ranks: `python examples/two_towers.py`, or under torchrun with 3 processes.

Rank 0 has the data and the loss; rank 1 has the tower of users, rank 2 that of items. The rows of both towers are
compared by a contrastive loss; its gradients travel to the ranks of the towers. Losses are those of one process."""

import torch
from torch import Tensor, nn

import meshwise as mw


class Tower(nn.Module):
    """Identifiers (B,) to vectors (B, 16) of length 1."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.rows = nn.Embedding(count, 32)
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, identifiers: Tensor) -> Tensor:
        """Return the vectors of some identifiers."""
        return nn.functional.normalize(self.layers(self.rows(identifiers)), dim=-1)


def adam(parameters: object) -> torch.optim.Optimizer:
    """Return the optimizer of a tower."""
    return torch.optim.Adam(parameters, lr=3e-3)  # type: ignore[arg-type]


def main(world: mw.World) -> None:
    """Train on one rank."""
    users = mw.remote(Tower, args=(1000, 1), world=world, rank=1, optimizer=adam)
    items = mw.remote(Tower, args=(50, 2), world=world, rank=2, optimizer=adam)
    for tower in (users, items):
        if tower.here:
            tower.serve()  # until rank 0 has closed it; then `tower.module` is trained
    if world.rank == 0:
        generator = torch.Generator().manual_seed(0)
        for step in range(1, 201):
            who = torch.randint(1000, (64,), generator=generator)
            left, right = users.begin(who), items.begin(torch.arange(50))  # both towers compute at the same time
            loss = nn.functional.cross_entropy(left.wait() @ right.wait().T / 0.1, who % 50)
            loss.backward()
            users.step()
            items.step()
            if step % 50 == 0:
                print(f"step {step:3}  loss {loss.item():.4f}")
        users.close()
        items.close()


if __name__ == "__main__":
    mw.run(3, main)
