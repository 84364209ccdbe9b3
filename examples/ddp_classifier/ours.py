"""Train a classifier on several processes under a plan: torchrun --standalone --nproc-per-node=2 ours.py"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import meshwise as mw

EPOCHS, BATCH = 3, 16


def pictures() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 1, 8, 8, generator=generator)
    return TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 6 * 6, 2)

    def forward(self, images):
        return self.head(self.features(images))


def main(world=None, plan="dp=auto"):
    torch.manual_seed(0)
    trainer = mw.parallelize(Classifier(), plan, world=world, optimizer=torch.optim.Adam, lr=1e-3)
    rank, size = trainer.world.rank, trainer.replicas
    data = pictures()
    sampler = DistributedSampler(data, num_replicas=size, rank=trainer.replica)
    loader = DataLoader(data, batch_size=BATCH // size, sampler=sampler)
    scheduler = OneCycleLR(trainer.optimizer, max_lr=1e-2, total_steps=EPOCHS * len(loader))
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            with trainer.open_step() as step:
                images, labels = step.rows(batch, local=True)
                loss = step.mean(cross_entropy(step.forward(images), labels, reduction="sum"), len(labels))
                step.backward(loss)
                step.clip(1.0)
                losses.append(step.update().loss)
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}  loss {losses[-1]:.6f}", flush=True)
    state = trainer.state_dict()
    if rank == 0:
        torch.save(state, "classifier.pt")
    return losses


if __name__ == "__main__":
    main()
