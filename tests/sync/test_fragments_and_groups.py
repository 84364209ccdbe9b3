"""Test rounds of which parts agree at different steps: streaming DiLoCo, hierarchical local SGD, and given graphs."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.sync.sync_scheme import SyncScheme, mixing_weights
from meshwise.testing import run
from sync.plain_replay import Replay
from sync.test_replay import batch, made, plain, require_equal

STEPS, EVERY = 11, 4
LR, MOMENTUM = 0.7, 0.9


def fragment_of(name: str, *, fragments: int) -> int:
    """Return the fragment of a parameter: its block, after the parameters outside of blocks, modulo the number."""
    return (1 + int(name.split(".")[1]) if name.startswith("blocks.") else 0) % fragments


def streaming(replay: Replay, *, steps: int, fragments: int, delay: int, blend: float) -> None:
    """Train with the streaming rule: take the change `delay` steps before it is applied, then blend."""
    names = [name for name, _ in replay.model.named_parameters()]
    counts = [[0.0] * replay.size for _ in range(fragments)]
    changes: dict[int, Tensor] = {}
    for step in range(1, steps + 1):
        replay.begin_round()
        replay.local_step(batch(step - 1))
        counts = [[a + b for a, b in zip(row, replay.counts, strict=True)] for row in counts]
        for fragment in range(fragments):
            offset = (fragment + 1) * EVERY // fragments
            mine = [index for index, name in enumerate(names) if fragment_of(name, fragments=fragments) == fragment]
            if (step + delay - offset) % EVERY == 0:
                weights = [count / sum(counts[fragment]) for count in counts[fragment]]
                counts[fragment] = [0.0] * replay.size
                mean = replay.average(replay.parameters(), weights=weights)
                changes |= {index: replay.anchor[index] - mean[index] for index in mine}
            if (step - offset) % EVERY == 0 and step > delay:
                for index in mine:
                    replay.momentum[index].mul_(MOMENTUM).add_(changes[index])
                    replay.anchor[index].sub_(LR * (changes[index] + MOMENTUM * replay.momentum[index]))
                    for replica in replay.parameters():
                        replica[index].copy_((1 - blend) * replay.anchor[index] + blend * replica[index])


@pytest.mark.parametrize("fragments, delay, blend", [(2, 0, 0.0), (3, 1, 0.0), (2, 3, 0.5), (1, 2, 0.25)])
def test_streaming_diloco_is_its_published_rule(tmp_path: Path, fragments: int, delay: int, blend: float) -> None:
    settings = {"fragments": fragments, "delay": delay, "blend": blend}

    def main(world: World) -> list[dict[str, Tensor]]:
        one = made(world, f"dp=3 sync=diloco every={EVERY}", settings=settings)
        for number in range(STEPS // 2):
            one.step(batch(number))
        one.save(tmp_path / "half")
        other = made(world, f"dp=3 sync=diloco every={EVERY}", settings=settings)
        other.load(tmp_path / "half")
        for number in range(STEPS // 2, STEPS):
            one.step(batch(number))
            other.step(batch(number))
        return [{name: value.clone() for name, value in trainer.full_parameters()} for trainer in (one, other)]

    replay = plain(3)
    streaming(replay, steps=STEPS, fragments=fragments, delay=delay, blend=blend)
    for found in run(3, main):
        require_equal(found[0], replay.mean())
        require_equal(found[1], replay.mean())


def own(world: World, plan: str, settings: Mapping[str, Any], steps: int) -> dict[str, Tensor]:
    """Return the parameters of this rank's replica after some steps."""
    trainer = made(world, plan, settings=settings)
    for number in range(steps):
        trainer.step(batch(number))
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def test_groups_agree_more_often_than_all() -> None:
    replay = plain(4)
    for number in range(5):
        replay.local_step(batch(number))
        if replay.steps % 4 == 0:
            replay.average_parameters()
            replay.average_state()
            replay.begin_round()
        elif replay.steps % 2 == 0:
            replay.mix([{0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}, {2: 0.5, 3: 0.5}, {2: 0.5, 3: 0.5}])
    names = [name for name, _ in replay.model.named_parameters()]
    found = run(4, own, args=("dp=4 sync=local every=4", {"group": 2, "group_every": 2}, 5))
    for ours, theirs in zip(found, replay.parameters(), strict=True):
        require_equal(ours, dict(zip(names, theirs, strict=True)))


MATRICES: Mapping[str, list[dict[int, float]]] = {
    "torus": [{r: 1 / 3, r ^ 1: 1 / 3, r ^ 2: 1 / 3} for r in range(4)],
    "groups:2": [{r: 0.5, r ^ 1: 0.5} for r in range(4)],
    "0-1,1-2,2-3": [
        {0: 2 / 3, 1: 1 / 3},
        {0: 1 / 3, 1: 1 / 3, 2: 1 / 3},
        {1: 1 / 3, 2: 1 / 3, 3: 1 / 3},
        {2: 1 / 3, 3: 2 / 3},
    ],
}


@pytest.mark.parametrize("graph", [*MATRICES, "exponential"])
def test_every_replica_mixes_by_its_row_of_the_matrix(graph: str) -> None:
    replay = plain(4)
    for number in range(4):
        replay.local_step(batch(number))
        hops = [{r: 0.5, (r - 2 ** (number % 2)) % 4: 0.5} for r in range(4)]
        replay.mix(hops if graph == "exponential" else MATRICES[graph])
    names = [name for name, _ in replay.model.named_parameters()]
    found = run(4, own, args=("dp=4 sync=gossip", {"graph": graph}, 4))
    for ours, theirs in zip(found, replay.parameters(), strict=True):
        require_equal(ours, dict(zip(names, theirs, strict=True)))


@pytest.mark.grid(
    Grid(
        {"graph": ("ring", "torus", "exponential", "groups:2"), "size": (1, 2, 4, 6, 16)},
        heavy=lambda cell: cell["size"] == 16 and cell["graph"] != "torus",  # the only one of four rows and columns
    )
)
def test_mixing_keeps_the_mean_and_connected_graphs_reach_it(graph: str, size: int) -> None:
    values = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean = values.mean()
    for number in range(800):
        rows = mixing_weights(graph, size=size, round_number=number)
        assert all(math.isclose(sum(row.values()), 1) and min(row.values()) > -1e-15 for row in rows)
        values = torch.stack([sum((w * values[q] for q, w in row.items()), torch.zeros(())) for row in rows])
        assert abs(float(values.mean() - mean)) < 1e-13
    assert (float((values - mean).abs().max()) < 1e-9) == (not graph.startswith("groups") or size <= 2)


@pytest.mark.parametrize("rows, columns", [(1, 5), (2, 3), (3, 4)])
def test_a_torus_is_as_square_as_it_can_be(rows: int, columns: int) -> None:
    for replica, row in enumerate(mixing_weights("torus", size=rows * columns, round_number=0)):
        r, c = divmod(replica, columns)
        beside = {r * columns + (c + 1) % columns, r * columns + (c - 1) % columns}
        above = {(r + 1) % rows * columns + c, (r - 1) % rows * columns + c}
        near = {replica} | beside | above
        assert row == pytest.approx(dict.fromkeys(near, 1 / len(near)))


@pytest.mark.parametrize(
    "settings",
    [
        {"every": 1},
        {"every": 6, "fragments": 4, "delay": 2},
        {"every": 5, "fragments": 5, "delay": 4},
        {"every": 4, "group": 2, "group_every": 6},
        {"every": 4, "group": 2, "group_every": 2},
        {"every": 1, "group": 2, "group_every": 3},
        {"every": 3, "group": 2, "group_every": 1},
        {"every": 2, "graph": "exponential"},
    ],
)
def test_every_step_of_a_round_is_of_one_kind(settings: dict[str, Any]) -> None:
    scheme = SyncScheme(**settings)
    kinds = scheme.kinds_of_steps(replicas=8)
    steps = sum(kinds.values())
    assert steps == math.lcm(scheme.every, scheme.group_every) * (3 if scheme.graph == "exponential" else 1)

    def exchanges(step: int) -> tuple[Any, ...]:
        """Return what follows a step: fragments begun and applied, agreements of groups, and the hop of a graph."""
        later = step + 5 * steps  # after the first round, where delayed exchanges are still missing
        mixed = (later - 1) // scheme.every % 3 if scheme.graph == "exponential" else 0
        begun, applied = scheme.fragments_to_begin(later), scheme.fragments_to_apply(later)
        return begun, applied, scheme.in_groups(later), mixed if applied else 0

    assert Counter(map(exchanges, range(1, steps + 1))) == {exchanges(step): times for step, times in kinds.items()}


def test_steps_at_which_replicas_agree() -> None:
    scheme = SyncScheme(every=4, group=2, group_every=2)
    assert [step for step in range(1, 9) if scheme.in_groups(step)] == [2, 6]  # after 4 and 8 all agree
    assert [step for step in range(1, 9) if scheme.fragments_to_apply(step)] == [4, 8]
    each = SyncScheme(every=2, fragments=2)
    assert [each.fragments_to_apply(step) for step in (1, 2, 3)] == [(0,), (1,), (0,)]
    assert SyncScheme(every=2, delay=1).state_names == ("agreed", "outer_change")
    assert SyncScheme(every=2, blend=0.5).has_anchor
