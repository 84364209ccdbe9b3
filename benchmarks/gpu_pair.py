"""Check plans on two GPUs over NCCL against one process, in float64, and time their steps.

    PYTHONPATH=src python benchmarks/gpu_pair.py                     # two processes of this machine, a GPU each
    PYTHONPATH=src python benchmarks/gpu_pair.py --device cpu        # whether it runs, without GPUs
    PYTHONPATH=src python benchmarks/gpu_pair.py "pp=2 microbatches=4 schedule=zb-h1"

Each plan is trained for two steps beside one process (`verify`). A hang is reported with the calls in which the ranks
wait. The exit status is 1 if a plan is not the same model."""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import nn

import meshwise as mw
from meshwise.comm.api.streams import gpu_count
from meshwise.reference import GPT, GPTConfig, next_token_loss

PLANS = (
    *(f"dp=2 zero={zero}" for zero in range(4)),
    "dp=2 zero=3 recompute=full offload=params:cpu,optimizer:cpu,activations:cpu",
    "tp=2",
    "tp=2 sequence_parallel=1",
    *(f"cp=2 context={name}" for name in ("ring", "zigzag", "ulysses", "gather")),
    *(f"pp=2 microbatches=4 schedule={name}" for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")),
    *(
        f"pp=2 microbatches=4 virtual_stages=2 schedule={name}"
        for name in ("interleaved", "looped", "zb-v", "dualpipev")
    ),
    "dp=2 precision=bf16",
)


def build() -> nn.Module:
    """Return a GPT of 4 blocks."""
    return GPT(GPTConfig(vocabulary=256, context=64, layers=4, heads=4, width=64))


def main(world: mw.World, plans: tuple[str, ...]) -> list[tuple[str, bool, str, float]]:
    """Return for each plan its text, whether it is the same model, the verdict, and the seconds of the check."""
    drawn = torch.randint(256, (2, 8, 65), generator=torch.Generator().manual_seed(0))
    batches = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in drawn]
    found = []
    for text in plans:
        options = mw.Options(example=batches[0] if "pp=" in text else None)
        begun = time.perf_counter()
        report = mw.verify(build, next_token_loss, batches, text, world=world, lr=1e-3, options=options)
        found.append((text, report.ok, report.verdict, time.perf_counter() - begun))
    return found


def command() -> int:
    """Start the ranks, print a row for each plan, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", default=list(PLANS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    flags = parser.parse_args()
    if flags.device == "cuda" and (gpus := gpu_count()) < 2:
        sys.stdout.write(f"skipped: two GPUs are needed, and torch finds {gpus}; --device cpu shows that it runs\n")
        return 0
    [rows, _] = mw.run(2, main, args=(tuple(flags.plans),), device="cpu" if flags.device == "cpu" else None)
    for text, ok, verdict, seconds in rows:
        sys.stdout.write(f"{'ok' if ok else 'DIFFERENT':9} {seconds:6.1f} s  {text}{'' if ok else f': {verdict}'}\n")
    return 0 if all(ok for _, ok, _, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(command())
