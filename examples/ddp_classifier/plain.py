"""Train a classifier on several processes with DDP: torchrun --standalone --nproc-per-node=2 plain.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = pictures()
    sampler = DistributedSampler(data, num_replicas=size, rank=rank)
    loader = DataLoader(data, batch_size=BATCH // size, sampler=sampler)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=EPOCHS * len(loader))
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            mean = loss.detach() / size
            dist.all_reduce(mean)
            losses.append(float(mean))
        if rank == 0:
            print(f"epoch {epoch}  loss {losses[-1]:.6f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "classifier.pt")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
