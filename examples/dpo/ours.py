"""Train on preferences with a reference model (DPO, arXiv 2305.18290), both split: python ours.py"""

import torch
from torch.nn.functional import logsigmoid

import meshwise as mw
from meshwise.reference import GPT, GPTConfig

STEPS, BATCH, BETA = 6, 6, 0.5
PLAN = "dp=2 zero=3"


def build():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=32, context=12, layers=2, heads=2, width=16, mlp_ratio=2))


def pairs(number):
    generator = torch.Generator().manual_seed(number)
    chosen, rejected = torch.randint(32, (2, BATCH, 12), generator=generator)
    return chosen, rejected


def score(logits, tokens):
    each = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return each.sum(-1)


def main(world, plan=PLAN):
    reference = mw.parallelize(build(), plan, world=world, optimizer=None)
    trainer = mw.parallelize(build(), plan, world=world, optimizer=torch.optim.Adam, lr=1e-3)
    losses = []
    for number in range(STEPS):
        with trainer.open_step() as step:
            chosen, rejected = step.rows(pairs(number))
            before = score(reference.predict(chosen), chosen) - score(reference.predict(rejected), rejected)
            after = score(step.forward(chosen), chosen) - score(step.forward(rejected), rejected)
            loss = step.mean(-logsigmoid(BETA * (after - before)).sum(), len(chosen))
            step.backward(loss)
            losses.append(step.update().loss)
    if world.rank == 0:
        print(f"losses {losses}")
    return losses


if __name__ == "__main__":
    mw.run(2, main)
