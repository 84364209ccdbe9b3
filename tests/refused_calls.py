"""Check that bad calls of collectives raise before data moves, and do not count as calls of the rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import World

MESH = Mesh.of(dp=2, one=1, tp=2)
_NARROWEST = torch.float8_e4m3fn


def bad_calls_are_refused_before_anything_moves(world: World) -> None:
    view = world.over(MESH)
    x, whole = torch.ones(4), torch.ones(8)
    narrow = x.to(_NARROWEST)
    refused: Sequence[tuple[str, Callable[[], object]]] = (
        ("no axis", lambda: view.all_reduce(x, axes="pp")),
        ("no reduction 'mean'", lambda: view.all_reduce(x, axes="dp", op="mean")),
        ("no max of torch.complex64", lambda: view.all_reduce(x.to(torch.complex64), axes="dp", op="max")),
        ("no sum of torch.uint16", lambda: view.reduce(x.to(torch.uint16), axes="dp")),
        ("no min of torch.float8", lambda: view.reduce_scatter(whole.to(_NARROWEST), into=narrow, axes="dp", op="min")),
        ("5 elements do not divide into 2", lambda: view.reduce_scatter(torch.ones(5), into=x, axes="dp")),
        ("3 parts for a group of 2", lambda: view.all_to_all([x] * 3, into=[x] * 3, axes="dp")),
        ("this rank's tensor has 3 elements", lambda: view.all_gather(x[:3], into=whole, axes="dp")),
        ("torch.float64", lambda: view.all_gather(x.double(), into=whole, axes="dp")),
        ("contiguous", lambda: view.all_reduce(torch.ones(2, 2).t(), axes="dp")),
        ("no message", lambda: view.send(x, axis="dp", to=view.group("dp").index)),
        ("no message", lambda: view.recv(x, axis="dp", source=2)),
        ("index 2", lambda: view.broadcast(x, axes="dp", source=2)),
    )
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()
    view.all_reduce(x, axes="dp").wait()  # as if nothing had been called
    assert x.tolist() == [2.0] * 4


def a_refused_call_was_not_made(world: World) -> None:
    """One rank's mistake, which it catches, is no call that the others have not made."""
    view = world.over(MESH)
    group = view.group("tp")
    x, strided, other = torch.ones(4), torch.ones(4, 2)[:, 0], 1 - group.index
    refused: list[Callable[[], object]] = [
        lambda: view.broadcast(strided, axes="tp"),
        lambda: view.reduce(strided, axes="tp"),
        lambda: view.all_reduce(strided, axes="tp"),
        lambda: view.all_gather(x, into=torch.ones(7), axes="tp"),
        lambda: view.reduce_scatter(x, into=torch.ones(3), axes="tp"),
        lambda: view.all_to_all(x, into=torch.ones(6), axes="tp"),
        lambda: view.gather(strided, into=None, axes="tp", target=other),
        lambda: view.gather(x, into=None, axes="tp", target=group.index),
        lambda: view.scatter(None, into=x, axes="tp", source=group.index),
        lambda: view.send(strided, axis="tp", to=other),
        lambda: view.recv(strided, axis="tp", source=other),
    ]
    with view.record() as records:
        for call in refused if world.rank == 0 else ():
            with pytest.raises(ValueError):  # noqa: PT011 -- each has its own words
                call()
    assert not records
    assert len(set(view.exchange(view.flight_recorder.digests.get(group.ranks), axes="tp"))) == 1
