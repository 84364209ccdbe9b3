"""Pipelines beside the peers: the same model, the same ranks, turn by turn, as in `peers.py`.

    python benchmarks/pipeline_peers.py                                     # meshwise and torch's pipelining
    python benchmarks/pipeline_peers.py --python deepspeed=/path/to/python  # and DeepSpeed's pipeline
    python benchmarks/pipeline_peers.py --only "4 ranks" --rounds 1

Each of ours meets the peer with the same schedule; then the best of ours meets the fastest peer. The last game is ours
against ours: 1F1B and GPipe differ in what they hold."""

from __future__ import annotations

import sys

import gpt
from games import Event, Game, Pairs
from pipeline_contestants import MICROBATCHES, contestant


def _game(ranks: int, ours: str, peer: str) -> Game:
    return Game(ranks, contestant(ours), contestant(peer))


GAMES = tuple(
    _game(ranks, ours, peer)
    for ranks in (2, 4)
    for ours, peer in (
        ("meshwise gpipe", "torch GPipe"),
        ("meshwise 1f1b", "torch 1F1B"),
        ("meshwise interleaved", "torch interleaved"),
        ("meshwise 1f1b", "DeepSpeed pipeline"),
        ("meshwise zb-h1", "DeepSpeed pipeline"),
        ("meshwise 1f1b", "meshwise gpipe"),
    )
)


def peaks(pairs: Pairs) -> str:
    """The table of what each rank of each contestant takes at most."""
    found: dict[tuple[int, str], tuple[float, ...]] = {}
    for game, played in pairs.items():
        for pair in played:
            for name, ranks in ((game.ours.name, pair.ours_megabytes), (game.peer.name, pair.peer_megabytes)):
                before = found.get((game.ranks, name), ranks)
                found[game.ranks, name] = tuple(map(max, before, ranks))
    head = ["| ranks | contestant | MB of each rank |", "|---|---|---|"]
    rows = [f"| {ranks} | {name} | {_each(peak)} |" for (ranks, name), peak in sorted(found.items())]
    return "\n".join([*head, *rows, ""])


def _each(megabytes: tuple[float, ...]) -> str:
    return " ".join(f"{one:.0f}" for one in megabytes)


def remarks(_shape: gpt.Shape) -> list[str]:
    """How it is set up."""
    return [
        f"{MICROBATCHES} micro-batches. The peers talk over gloo; their stages are cut to have the least largest one.",
        "MB of each rank: high-water mark of resident memory in the timed steps, libraries too, over all games.",
    ]


EVENT = Event(
    "pipeline_peers.py", __doc__, "pipeline peers", games=GAMES, packages=["deepspeed"], remarks=remarks, more=peaks
)


if __name__ == "__main__":
    sys.exit(EVENT.main(sys.argv[1:]))
