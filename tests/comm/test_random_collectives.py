"""Test random programs of overlapping collectives: every world gives the results of the thread world.

A seed is a program: calls of all kinds along any axes, the same on every rank. Each rank draws separately when it waits
for a call, and which calls it never waits for. A tensor is overwritten right after its wait, as a reused buffer is."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from joined_worlds import joined
from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import Work, World
from meshwise.testing import run
from warm_processes import Processes

SIZE = 4
MESH = Mesh.of(a=2, b=2)
AXES: Sequence[str | tuple[str, ...]] = ("a", "b", ("a", "b"))
LENGTHS = (0, 1, 7, 5_000, 40_000)  # contents that travel with the call, and tensors that are read where they lie
SEEDS = range(8)
CALLS = 25


@dataclass
class Begun:
    """A call under way. `found`: what it brings, where this rank gets anything; `used`: all of its tensors."""

    works: Sequence[Work]
    found: Sequence[Tensor]
    used: Sequence[Tensor]


@dataclass(frozen=True)
class Drawn:
    """One call of a program, on one rank."""

    world: World
    axes: str | tuple[str, ...]
    length: int
    root: int
    memory: Callable[[int], Tensor]

    @property
    def parts(self) -> int:
        return self.world.group(self.axes).size

    @property
    def here(self) -> bool:
        return self.world.group(self.axes).index == self.root % self.parts

    def values(self, parts: int = 1) -> Tensor:
        """Whole numbers, so that no order of their sum rounds."""
        x = self.memory(parts * self.length)
        return x.copy_((torch.arange(parts * self.length) * 7 + 3 * self.world.rank) % 11)

    def all_reduce(self) -> Begun:
        x = self.values()
        return Begun([self.world.all_reduce(x, axes=self.axes)], [x], [x])

    def reduce(self) -> Begun:
        x = self.values()
        work = self.world.reduce(x, axes=self.axes, target=self.root % self.parts)
        return Begun([work], [x] if self.here else [], [x])

    def broadcast(self) -> Begun:
        x = self.values()
        return Begun([self.world.broadcast(x, axes=self.axes, source=self.root % self.parts)], [x], [x])

    def all_gather(self) -> Begun:
        x, y = self.values(), self.memory(self.parts * self.length)
        return Begun([self.world.all_gather(x, into=y, axes=self.axes)], [y], [x, y])

    def reduce_scatter(self) -> Begun:
        x, y = self.values(self.parts), self.memory(self.length)
        return Begun([self.world.reduce_scatter(x, into=y, axes=self.axes)], [y], [x, y])

    def all_to_all(self) -> Begun:
        x, y = self.values(self.parts), self.memory(self.parts * self.length)
        return Begun([self.world.all_to_all(x, into=y, axes=self.axes)], [y], [x, y])

    def gather(self) -> Begun:
        x, y = self.values(), self.memory(self.parts * self.length)
        into = y if self.here else None
        work = self.world.gather(x, into=into, axes=self.axes, target=self.root % self.parts)
        return Begun([work], [y] if self.here else [], [x, y])

    def scatter(self) -> Begun:
        x, y = self.values(self.parts), self.memory(self.length)
        given = x if self.here else None
        work = self.world.scatter(given, into=y, axes=self.axes, source=self.root % self.parts)
        return Begun([work], [y], [x, y])

    def shift(self) -> Begun:
        axis, x, y = "a" if self.root % 2 else "b", self.values(), self.memory(self.length)
        other = 1 - self.world.group(axis).index
        return Begun(
            [self.world.send(x, axis=axis, to=other), self.world.recv(y, axis=axis, source=other)], [y], [x, y]
        )

    def barrier(self) -> Begun:
        self.world.barrier(axes=self.axes)
        return Begun([], [], [])


KINDS = (
    Drawn.all_reduce,
    Drawn.all_reduce,
    Drawn.reduce,
    Drawn.broadcast,
    Drawn.all_gather,
    Drawn.reduce_scatter,
    Drawn.all_to_all,
    Drawn.gather,
    Drawn.scatter,
    Drawn.shift,
    Drawn.barrier,
)


def program(world: World, seed: int) -> dict[int, list[Tensor]]:
    """Run it; what every call that was waited for has brought."""
    view = world.over(MESH)
    common, own = random.Random(seed), random.Random(SIZE * seed + world.rank)
    opened: dict[int, Begun] = {}
    brought: dict[int, list[Tensor]] = {}

    def wait(number: int) -> None:
        begun = opened.pop(number)
        for work in own.sample(begun.works, len(begun.works)):
            work.wait()
        brought[number] = [x.clone() for x in begun.found]
        for x in begun.used:
            x.fill_(-1)

    for number in range(CALLS):
        kind, axes, length = common.choice(KINDS), common.choice(AXES), common.choice(LENGTHS)
        memory = own.choice([ordinary, lambda numel: view.empty(numel, dtype=torch.float64)])
        opened[number] = kind(Drawn(view, axes, length, common.randrange(SIZE), memory))
        for waited in own.sample(list(opened), own.randrange(len(opened) + 1) if own.random() < 0.3 else 0):
            wait(waited)
    for number in own.sample(list(opened), len(opened)):
        if own.random() < 0.9:
            wait(number)
    return brought


def ordinary(numel: int) -> Tensor:
    return torch.empty(numel, dtype=torch.float64)


def programs(world: World, name: str, how: str) -> list[dict[int, list[Tensor]]]:
    other = joined(world, name, how)
    found = [program(other, seed) for seed in SEEDS]
    other.close()
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[dict[int, list[Tensor]]]]:
    """By seed and rank, what the thread world brings."""
    return [run(SIZE, program, args=(seed,)) for seed in SEEDS]


@pytest.mark.processes
@pytest.mark.parametrize("how", ["shared memory", "gloo", "one two one two", "one one two two", "one two two two"])
def test_whatever_is_waited_for_when(
    how: str, processes: Processes, expected: list[list[dict[int, list[Tensor]]]]
) -> None:
    found = run(SIZE, programs, on=processes, args=(uuid.uuid4().hex, how))
    for at, seed in enumerate(SEEDS):
        for rank, wanted in enumerate(expected[at]):
            assert found[rank][at].keys() == wanted.keys()
            for number, tensors in wanted.items():
                for x, y in zip(found[rank][at][number], tensors, strict=True):
                    assert torch.equal(x, y), f"seed {seed}, rank {rank}, call {number}"
