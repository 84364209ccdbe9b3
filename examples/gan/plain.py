"""Train a generator and a critic against each other on one process: python plain.py"""

import torch
from torch import nn
from torch.nn.functional import softplus

STEPS, BATCH, NOISE = 8, 16, 4


def network(inputs, outputs, seed):
    torch.manual_seed(seed)
    norm = nn.LayerNorm(16)
    return nn.Sequential(nn.Linear(inputs, 16), norm, nn.ReLU(), nn.Linear(16, outputs))


def noise(number):
    return torch.randn(BATCH, NOISE, generator=torch.Generator().manual_seed(number))


def real(number):
    angle = 6.28 * torch.rand(BATCH, generator=torch.Generator().manual_seed(100 + number))
    return torch.stack([angle.cos(), angle.sin()], 1)


def main():
    generator, critic = network(NOISE, 2, seed=1), network(2, 1, seed=2)
    generate = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    judge = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
    losses = []
    for number in range(STEPS):
        with torch.no_grad():
            fake = generator(noise(2 * number))
        loss = softplus(-critic(real(number))).mean() + softplus(critic(fake)).mean()
        judge.zero_grad()
        loss.backward()
        judge.step()
        losses.append(float(loss.detach()))

        loss = softplus(-critic(generator(noise(2 * number + 1)))).mean()
        generate.zero_grad()
        loss.backward()
        generate.step()
        losses.append(float(loss.detach()))
    print(f"losses {losses}")
    return losses


if __name__ == "__main__":
    main()
