"""The order of samples: permutations, the same for every plan, continued from a counter."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from meshwise.base.mesh import even_split
from meshwise.train.data_loading import SampleOrder


@given(size=st.integers(1, 300), seed=st.integers(-5, 2**64), epoch=st.integers(0, 10**6))
def test_an_epoch_meets_every_sample_once(size: int, seed: int, epoch: int) -> None:
    indices = SampleOrder(size, seed=seed).indices(epoch * size, stop=(epoch + 1) * size)

    assert sorted(indices) == list(range(size))


def test_epochs_and_seeds_are_different_permutations() -> None:
    orders = [
        tuple(SampleOrder(50, seed=seed).indices(epoch * 50, stop=epoch * 50 + 50))
        for seed in range(4)
        for epoch in range(4)
    ]

    assert len(set(orders)) == 16


@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 12),
    ranks=st.integers(1, 5),
    step=st.integers(0, 1000),
)
def test_any_number_of_ranks_draws_the_same_global_batch(size: int, batch: int, ranks: int, step: int) -> None:
    order = SampleOrder(size, seed=3)
    first = step * batch

    alone = order.indices(first, stop=first + batch)
    shares = [order.indices(first + start, stop=first + stop) for start, stop in even_split(batch, ranks)]

    assert len(alone) == batch
    assert list(itertools.chain.from_iterable(shares)) == alone


def test_resuming_is_setting_the_counter() -> None:
    order = SampleOrder(17, seed=1)
    whole = order.indices(0, stop=100)

    assert order.indices(0, stop=41) + SampleOrder(17, seed=1).indices(41, stop=100) == whole


def test_the_order_of_a_seed_never_changes() -> None:
    # A run that resumes after an upgrade has to continue in the order it began with.
    assert SampleOrder(10, seed=0).indices(0, stop=20) == GOLDEN


def test_every_sample_comes_first_about_equally_often() -> None:
    size, seeds = 10, 2000
    counts = [0] * size
    for seed in range(seeds):
        counts[SampleOrder(size, seed=seed).indices(0, stop=1)[0]] += 1

    chi_squared = sum((count - seeds / size) ** 2 / (seeds / size) for count in counts)
    assert chi_squared < 28  # 9 degrees of freedom: once in a thousand by chance


def test_what_follows_a_sample_does_not_depend_on_it() -> None:
    size, seeds = 5, 2500
    pairs: dict[tuple[int, ...], int] = {}
    for seed in range(seeds):
        pair = tuple(SampleOrder(size, seed=seed).indices(0, stop=2))
        pairs[pair] = pairs.get(pair, 0) + 1

    expected = seeds / (size * (size - 1))
    chi_squared = sum((count - expected) ** 2 / expected for count in pairs.values())
    assert len(pairs) == 20
    assert chi_squared < 44  # 19 degrees of freedom: once in a thousand by chance


def test_a_thousand_million_samples_cost_no_memory() -> None:
    indices = SampleOrder(10**9 + 7, seed=2).indices(10**15, stop=10**15 + 1000)

    assert len(set(indices)) == 1000
    assert max(indices) > 10**9 * 0.9
    assert min(indices) < 10**9 * 0.1


GOLDEN = [5, 6, 7, 9, 2, 4, 1, 3, 8, 0, 4, 3, 8, 1, 5, 2, 6, 7, 0, 9]
