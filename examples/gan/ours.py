"""Train a generator and a critic against each other, both split over the ranks: python ours.py"""

import torch
from torch import nn
from torch.nn.functional import softplus

import meshwise as mw

STEPS, BATCH, NOISE = 8, 16, 4
PLAN = "dp=2 zero=3"


def network(inputs, outputs, seed):
    torch.manual_seed(seed)
    norm = nn.LayerNorm(16)
    return nn.Sequential(nn.Linear(inputs, 16), norm, nn.ReLU(), nn.Linear(16, outputs))


def noise(number):
    return torch.randn(BATCH, NOISE, generator=torch.Generator().manual_seed(number))


def real(number):
    angle = 6.28 * torch.rand(BATCH, generator=torch.Generator().manual_seed(100 + number))
    return torch.stack([angle.cos(), angle.sin()], 1)


def main(world, plan=PLAN):
    adam = {"world": world, "optimizer": torch.optim.Adam, "betas": (0.5, 0.99)}
    generator = mw.parallelize(network(NOISE, 2, seed=1), plan, lr=1e-3, **adam)
    critic = mw.parallelize(network(2, 1, seed=2), plan, lr=2e-3, **adam)
    losses = []
    for number in range(STEPS):
        with critic.open_step() as step:
            with torch.no_grad():
                fake = step.through(generator, step.rows(noise(2 * number)))
            score = softplus(-step.forward(step.rows(real(number)))) + softplus(step.forward(fake))
            step.backward(step.mean(score.sum(), len(score)))
            losses.append(step.update().loss)

        with generator.open_step() as step:
            score = softplus(-step.through(critic, step.forward(step.rows(noise(2 * number + 1)))))
            step.backward(step.mean(score.sum(), len(score)))
            losses.append(step.update().loss)
    if world.rank == 0:
        print(f"losses {losses}")
    return losses


if __name__ == "__main__":
    mw.run(2, main)
