"""What a rank stores of a whole model under each scheme of tensor parallelism, and how much less that is.

    python benchmarks/tensor_memory.py
    python benchmarks/tensor_memory.py --docs docs/benchmarks.md

Parameters, and what a forward with its loss leaves for the backward, of the first rank of a world of any size, of which
nobody else is there (the trace world). Plans of up to four ranks are run on processes as well, which have to say the
same."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from meshwise import Plan
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import TraceWorld
from meshwise.engine.parallelize import parallelize
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import SavedForBackward, run
from peer_table import write_between_markers

SHAPE = GPTConfig(vocabulary=2048, context=64, layers=4, heads=16, width=128, positions="rotary")
ROWS = 64
ON_PROCESSES = 4

PLANS = {
    "tp=1": ("1", "1"),
    "tp=4": ("tp", "less than tp: the stream is whole"),
    "tp=16": ("tp", "less than tp: the stream is whole"),
    "tp=4 sequence_parallel=1": ("tp", "tp"),
    "tp=16 sequence_parallel=1": ("tp", "tp"),
    "tp=4 tp_mode=2d": ("q²", "q²"),
    "tp=16 tp_mode=2d": ("q²", "q²"),
    "tp=8 tp_mode=2.5d tp_depth=2": ("q²", "q²·d"),
    "tp=64 tp_mode=2.5d tp_depth=4": ("q²", "q²·d"),
    "tp=8 tp_mode=3d": ("p³", "p³"),
    "tp=64 tp_mode=3d": ("p³", "p³"),
}
"""With the factors that are published: of parameters, of activations. Heads bound q and 1D's tp."""


def build() -> GPT:
    """The model."""
    return GPT(SHAPE)


def stored(world: World, plan: str) -> tuple[int, int]:
    """Bytes of the parameters on this rank, and of what a forward and its loss save."""
    trainer = parallelize(build, plan, loss=next_token_loss, world=world, lr=1e-3)
    start, stop = trainer.share(ROWS)
    text = torch.arange(ROWS * SHAPE.context).remainder(SHAPE.vocabulary).view(ROWS, -1)[start:stop]
    with SavedForBackward(trainer.model) as saved:
        total, _ = next_token_loss(trainer.model(text), (text, text))
    assert total.requires_grad
    size = saved.bytes
    trainer.close()
    return trainer.memory()["parameters"], size


def table() -> str:
    """Measure every plan. Raises RuntimeError when processes store something else than the trace says."""
    lines = [
        "| plan | parameters, MB | divided by | published | activations, MB | divided by | published |",
        "|---|---|---|---|---|---|---|",
    ]
    whole = None
    for plan, published in PLANS.items():
        mesh = Plan.parse(plan).mesh()
        found = stored(TraceWorld(rank=0, mesh=mesh, device="cpu"), plan)
        if 1 < mesh.size <= ON_PROCESSES:
            real = run(mesh.size, stored, on="processes", args=(plan,))
            if real != [found] * mesh.size:
                raise RuntimeError(f"{plan}: the trace says {found}, processes store {real}")
        whole = whole or found
        cells = [
            f"{bytes_ / 1e6:.2f} | {before / bytes_:.2f} | {factor}"
            for bytes_, before, factor in zip(found, whole, published, strict=True)
        ]
        lines.append(f"| `{plan}` | {' | '.join(cells)} |")
    model = (
        f"GPT of {SHAPE.layers} layers, width {SHAPE.width}, {SHAPE.heads} heads, sequence {SHAPE.context}, "
        f"vocabulary {SHAPE.vocabulary}, {ROWS} rows, fp32"
    )
    remarks = [
        "",
        f"- Model: {model}.",
        "- Norms are whole under 1D, where the stream is whole outside of the blocks; buckets are padded.",
        f"- Measured on the first rank of a traced world; plans of {ON_PROCESSES} ranks on processes too, which agree.",
        "- Made by `python benchmarks/tensor_memory.py --docs docs/benchmarks.md`.",
    ]
    return "\n".join([*lines, *remarks]) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Print the table, and write it into the page that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="write the table between the markers `tensor memory` of this file")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    text = table()
    print(text)
    if arguments.docs:
        write_between_markers(arguments.docs, text=text, table="tensor memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
