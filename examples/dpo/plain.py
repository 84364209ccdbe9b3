"""Train on preferences with a reference model (DPO, arXiv 2305.18290) on one process: python plain.py"""

import copy

import torch
from torch.nn.functional import logsigmoid

from meshwise.reference import GPT, GPTConfig

STEPS, BATCH, BETA = 6, 6, 0.5


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


def main():
    model = build()
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for number in range(STEPS):
        chosen, rejected = pairs(number)
        with torch.no_grad():
            before = score(reference(chosen), chosen) - score(reference(rejected), rejected)
        after = score(model(chosen), chosen) - score(model(rejected), rejected)
        loss = -logsigmoid(BETA * (after - before)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    print(f"losses {losses}")
    return losses


if __name__ == "__main__":
    main()
