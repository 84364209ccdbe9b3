"""Train a GPT for one step on one long sequence under each plan, and print the peak memory of a rank.

    python benchmarks/long_sequence.py cp=4 --tokens 16384
    python benchmarks/long_sequence.py dp=1 cp=2 cp=4 --tokens 16384

Each rank is a process. Under `ulimit -d` (KiB of data of a process), cp=4 trains where dp=1 has too little memory.
After `dp=1`, a last column divides a step's memory times the number of ranks by that of one process."""

import argparse
import resource

import torch

import meshwise as mw
from meshwise.reference import GPT, GPTConfig
from meshwise.reference.gpt import next_token_loss


def peak(world: mw.World, plan: str, tokens: int) -> tuple[float, float, float]:
    """Train one step; return the loss, and the largest resident memory of a rank before and at most, in GiB."""
    torch.set_num_threads(1)
    config = GPTConfig(vocabulary=256, context=tokens, layers=4, heads=4, width=256, positions="rotary")
    trainer = mw.parallelize(lambda: GPT(config), plan, loss=next_token_loss, world=world, lr=1e-3)
    drawn = torch.randint(256, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = trainer.step((drawn[:, :-1], drawn[:, 1:])).loss
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return loss, max(world.exchange(before)) / 2**20, max(world.exchange(after)) / 2**20


def main() -> None:
    """Print a line for each plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plans", nargs="+")
    parser.add_argument("--tokens", type=int, default=16384)
    given = parser.parse_args()
    one = None
    for plan in given.plans:
        ranks = mw.Plan.parse(plan).mesh().size
        loss, before, after = mw.run(ranks, peak, args=(plan, given.tokens))[0]
        one = after - before if ranks == 1 else one
        line = f"{plan}  {given.tokens} tokens  loss {loss:.4f}  {before:.2f} GiB before the step, peak {after:.2f} GiB"
        print(line if one is None else f"{line}, {ranks * (after - before) / one:.2f}", flush=True)


if __name__ == "__main__":
    main()
