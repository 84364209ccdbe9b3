"""Training scripts in plain torch on one process, of which `test_moving` has a version with meshwise each."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss, softmax, softplus
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import TensorDataset

from meshwise.testing import build_whole

STEPS = 3


def network(outputs: int = 3, inputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, outputs)).double()


def made(seed: int = 0, **sizes: int) -> nn.Module:
    return build_whole(functools.partial(network, **sizes), seed=seed)


def rows(number: int, columns: int = 4, count: int = 6) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def batch(number: int, count: int = 6) -> tuple[Tensor, Tensor]:
    return rows(number, count=count), torch.randint(3, (count,), generator=torch.Generator().manual_seed(number))


def sums(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def step_of(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        output = self.net(x)
        return output, cross_entropy(output, labels)


def plain_own_loss() -> Any:
    model = build_whole(Labelled, seed=0)
    optimizer = sgd(model)
    return [step_of(optimizer, model(*batch(number))[1]) for number in range(STEPS)], list(model.parameters())


def plain_sum() -> Any:
    model = made()
    optimizer = sgd(model, lr=0.01)
    losses = [step_of(optimizer, sums(model(batch(number)[0]), batch(number))[0]) for number in range(STEPS)]
    return losses, list(model.parameters())


def weights(number: int) -> Tensor:
    return torch.rand(6, generator=torch.Generator().manual_seed(number)).double()


def plain_weighted() -> Any:
    model = made()
    optimizer, losses = sgd(model), []
    for number in range(STEPS):
        (x, labels), weight = batch(number), weights(number)
        each = cross_entropy(model(x), labels, reduction="none")
        losses.append(step_of(optimizer, (each * weight).sum() / weight.sum()))
    return losses, list(model.parameters())


def size_of(model: nn.Module) -> Tensor:
    return 0.01 * torch.stack([each.abs().sum() for each in model.parameters()]).sum()


def plain_penalty() -> Any:
    model = made()
    optimizer, losses = sgd(model), []
    for number in range(STEPS):
        x, labels = batch(number)
        losses.append(step_of(optimizer, cross_entropy(model(x), labels) + size_of(model)))
    return losses, list(model.parameters())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        output, hidden = self.rnn(x, hidden)
        return self.head(output), hidden


def chunks() -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets of (tokens, samples, features), as for a recurrent network."""
    whole = torch.stack([rows(number) for number in range(3 * STEPS + 1)])
    return [(whole[start : start + 3], whole[start + 1 : start + 4]) for start in range(0, 3 * STEPS, 3)]


def plain_tokens_first() -> Any:
    model = build_whole(lambda: Recurrent().double(), seed=0)
    optimizer, losses, hidden = sgd(model), [], torch.zeros(1, 6, 8, dtype=torch.float64)
    for x, target in chunks():
        output, hidden = model(x, hidden.detach())
        losses.append(step_of(optimizer, mse_loss(output, target)))
    return losses, list(model.parameters())


def plain_accumulation() -> Any:
    model = made()
    optimizer, losses = sgd(model), []
    for number in range(STEPS):
        optimizer.zero_grad()
        parts = []
        for part in range(4):
            x, labels = batch(4 * number + part)
            loss = cross_entropy(model(x), labels)
            (loss / 4).backward()
            parts.append(float(loss.detach()) / 4)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(sum(parts))
    return losses, list(model.parameters())


def plain_clipping() -> Any:
    model = made()
    optimizer, norms = sgd(model), []
    for number in range(STEPS):
        x, labels = batch(number)
        optimizer.zero_grad()
        cross_entropy(model(x), labels).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
    return norms, list(model.parameters())


def plain_schedules() -> Any:
    model = made()
    optimizer, found = sgd(model), []
    cycle = OneCycleLR(optimizer, max_lr=0.2, total_steps=2 * STEPS)
    plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for number in range(2 * STEPS):
        x, labels = batch(number)
        found.append(step_of(optimizer, cross_entropy(model(x), labels)))
        if number < STEPS:
            cycle.step()
        else:
            with torch.no_grad():
                plateau.step(cross_entropy(model(batch(99)[0]), batch(99)[1]))
        found += [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]]
    return found, list(model.parameters())


def plain_groups() -> Any:
    model = made()
    named = list(model.named_parameters())
    groups = [
        {"params": [each for name, each in named if not name.endswith("bias")], "weight_decay": 0.5},
        {"params": [each for name, each in named if name.endswith("bias")], "weight_decay": 0.0, "lr": 0.05},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for number in range(STEPS):
        for group, scale in zip(optimizer.param_groups, (1.0, 5.0), strict=True):
            group["lr"] = 0.01 * scale / (1 + number)
        step_of(optimizer, cross_entropy(model(batch(number)[0]), batch(number)[1]))
    return list(model.parameters())


def plain_clamped() -> Any:
    model = made()
    optimizer = sgd(model)
    for number in range(STEPS):
        step_of(optimizer, cross_entropy(model(batch(number)[0]), batch(number)[1]))
        with torch.no_grad():
            for each in model.parameters():
                each.clamp_(-0.3, 0.3)
    return list(model.parameters())


def plain_gan() -> Any:
    generator, critic = made(1, outputs=2), made(2, outputs=1, inputs=2)
    make, judge, losses = sgd(generator), sgd(critic), []
    for number in range(STEPS):
        fake = generator(rows(number))
        losses.append(
            step_of(judge, (softplus(-critic(rows(50 + number, 2))) + softplus(critic(fake.detach()))).mean())
        )
        losses.append(step_of(make, softplus(-critic(fake)).mean()))
    return losses, list(generator.parameters()), list(critic.parameters())


def plain_teacher() -> Any:
    model, teacher, losses = made(), made(7).eval(), []
    optimizer = sgd(model)
    for number in range(STEPS):
        x = rows(number)
        with torch.no_grad():
            wanted = softmax(teacher(x) / 2, -1)
        losses.append(step_of(optimizer, kl_div(log_softmax(model(x) / 2, -1), wanted, reduction="batchmean")))
    return losses, list(model.parameters())


def contrast(a: Tensor, b: Tensor) -> Tensor:
    logits, labels = a @ b.T, torch.arange(len(a))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def plain_contrast() -> Any:
    model = made()
    optimizer = sgd(model)
    losses = [step_of(optimizer, contrast(model(rows(number)), model(rows(50 + number)))) for number in range(STEPS)]
    return losses, list(model.parameters())


def plain_gradient_penalty() -> Any:
    model, losses = made(), []
    optimizer = sgd(model)
    for number in range(STEPS):
        x = rows(number).requires_grad_()
        output = model(x)
        [slope] = torch.autograd.grad(output.sum(), x, create_graph=True)
        losses.append(step_of(optimizer, output.square().mean() + (slope.norm(dim=1) - 1).square().mean()))
    return losses, list(model.parameters())


def plain_average() -> Any:
    model, average, found = made(), made(), []
    optimizer = sgd(model)
    for number in range(STEPS):
        step_of(optimizer, cross_entropy(model(batch(number)[0]), batch(number)[1]))
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 1 - 0.9)
            found.append(float(cross_entropy(average(batch(99)[0]), batch(99)[1])))
    return found, list(model.parameters())


def plain_metrics() -> Any:
    model = made().eval()
    batches = [batch(number, count=count) for number, count in enumerate((6, 6, 1))]
    with torch.no_grad():
        outputs = [model(x) for x, _ in batches]
    right = sum(int((output.argmax(1) == labels).sum()) for output, (_, labels) in zip(outputs, batches, strict=True))
    every = torch.cat([cross_entropy(o, b[1], reduction="none") for o, b in zip(outputs, batches, strict=True)])
    return float(every.mean()), right / 13


def plain_resumed() -> Any:
    model = made()
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    for number in range(4):
        losses.append(step_of(optimizer, cross_entropy(model(batch(number)[0]), batch(number)[1])))
        scheduler.step()
    return losses, list(model.parameters())


def plain_sampler() -> Any:
    """One process, with the rows that the samplers of six ranks give together."""
    model, data, losses = made(), TensorDataset(*batch(0, count=24)), []
    optimizer = sgd(model)
    for epoch in range(2):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(6):
            x, labels = data[chosen]
            losses.append(step_of(optimizer, cross_entropy(model(x), labels)))
    return losses, list(model.parameters())


def plain_logging() -> Any:
    model = made()
    optimizer, found = sgd(model), []
    for number in range(STEPS):
        loss = step_of(optimizer, cross_entropy(model(batch(number)[0]), batch(number)[1]))
        norms = {name: float(each.grad.norm()) for name, each in model.named_parameters() if each.grad is not None}
        found.append((loss, norms))
    return [{"losses": [loss for loss, _ in found], "norms": [norms for _, norms in found]}]


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = network(2), network(4, inputs=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encoder(x))

    def decode(self, z: Tensor) -> Tensor:
        decoded: Tensor = self.decoder(z)
        return decoded


def plain_sampling() -> Any:
    model = build_whole(Coder, seed=0)
    optimizer = sgd(model)
    losses = [step_of(optimizer, mse_loss(model(rows(number)), rows(number))) for number in range(STEPS)]
    return losses, model.decode(rows(99, 2)).detach()  # type: ignore[operator]
