"""Train a GPT for one step on one long sequence, and print the peak memory of a rank.

    python benchmarks/long_sequence.py cp=4 --tokens 16384

Each rank is a process. Under `ulimit -d` (KiB of data of a process), cp=4 trains where dp=1 has too little memory."""

import argparse
import resource

import torch

import meshwise as mw
from meshwise.reference import GPT, GPTConfig
from meshwise.reference.gpt import next_token_loss


def peak(world: mw.World, plan: str, tokens: int) -> str:
    """Train one step; return the loss and the largest peak of a rank."""
    torch.set_num_threads(1)
    config = GPTConfig(vocabulary=256, context=tokens, layers=4, heads=4, width=256, positions="rotary")
    trainer = mw.parallelize(lambda: GPT(config), plan, loss=next_token_loss, world=world, lr=1e-3)
    drawn = torch.randint(256, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = trainer.step((drawn[:, :-1], drawn[:, 1:])).loss
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first, last = max(world.exchange(before)) / 2**20, max(world.exchange(after)) / 2**20
    return f"{plan}  {tokens} tokens  loss {loss:.4f}  {first:.2f} GiB before the step, peak {last:.2f} GiB"


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan")
    parser.add_argument("--tokens", type=int, default=16384)
    given = parser.parse_args()
    ranks = mw.Plan.parse(given.plan).mesh().size
    print(mw.run(ranks, peak, args=(given.plan, given.tokens))[0])


if __name__ == "__main__":
    main()
