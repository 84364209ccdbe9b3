"""Bits by key and index: a part of a draw equals that part of the whole draw, and bits are random along every dim."""

import math

import pytest
import torch
from torch import Tensor

from meshwise.model.random_bits import Distribution, IndexBlock, draw, exponential, keep_mask, normal, uniform

CPU = torch.device("cpu")
WORDS = Distribution(torch.int32, lambda word, out: out.copy_(word))
EXTREMES = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)


def whole(shape: tuple[int, ...], *, kind: Distribution = WORDS, key: int = 7) -> Tensor:
    return draw(IndexBlock(shape, (0,) * len(shape)), key=key, kind=kind, device=CPU)


def of_extremes(kind: Distribution) -> Tensor:
    """What is made of the smallest and the largest word."""
    out = torch.empty(2, dtype=kind.dtype)
    kind.write(EXTREMES.clone(), out)
    return out


def signs(shape: tuple[int, ...], *, probability: float, key: int = 7) -> Tensor:
    """A mask, shifted and scaled to mean 0 and variance 1 if it is what it claims to be."""
    mask = whole(shape, kind=keep_mask(probability), key=key).double()
    return (mask - probability) / math.sqrt(probability * (1 - probability))


@pytest.mark.parametrize(
    "starts, stops",
    [((0, 0, 0), (5, 6, 7)), ((2, 3, 1), (4, 4, 7)), ((4, 0, 6), (5, 6, 7)), ((1, 1, 1), (1, 3, 3))],
)
def test_a_part_is_that_part_of_the_whole(starts: tuple[int, ...], stops: tuple[int, ...]) -> None:
    shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    part = draw(IndexBlock(shape, starts), key=7, kind=WORDS, device=CPU)
    assert torch.equal(part, whole((5, 6, 7))[tuple(slice(*ends) for ends in zip(starts, stops, strict=True))])


def test_a_draw_larger_than_a_block_is_one_draw() -> None:
    rows = draw(IndexBlock((3, 50_000), (1, 0)), key=7, kind=WORDS, device=CPU)
    assert torch.equal(rows, whole((4, 50_000))[1:])


@pytest.mark.parametrize("shape", [(64, 48), (4, 5, 48), (2, 3, 4, 5), (0, 3)])
def test_shapes_of_any_number_of_dims_are_drawn(shape: tuple[int, ...]) -> None:
    words = whole(shape)
    assert words.shape == shape
    assert words.unique().numel() == words.numel()


@pytest.mark.parametrize("probability", [0.5, 0.1, 0.9])
def test_a_mask_keeps_its_probability_and_its_parts_are_independent(probability: float) -> None:
    mask = signs((16, 64, 512), probability=probability)
    rows = mask.flatten(0, 1)
    assert abs(mask.sum()) / math.sqrt(mask.numel()) < 4
    assert rows.sum(1).var() / 512 == pytest.approx(1, abs=0.2)
    assert rows.sum(0).var() / 1024 == pytest.approx(1, abs=0.25)
    neighbours = {
        "columns": mask[..., 1:] * mask[..., :-1],
        "rows": mask[:, 1:] * mask[:, :-1],
        "samples": mask[1:] * mask[:-1],
        "squares": rows[::2, ::2] * rows[1::2, ::2] * rows[::2, 1::2] * rows[1::2, 1::2],
        "keys": mask * signs((16, 64, 512), probability=probability, key=8),
    }
    for name, product in neighbours.items():
        assert abs(product.sum()) / math.sqrt(product.numel()) < 4, name


def test_no_two_rows_and_no_two_columns_are_correlated() -> None:
    rows = signs((1024, 512), probability=0.5)
    for apart in (rows @ rows.T / math.sqrt(512), rows.T @ rows / math.sqrt(1024)):
        apart.fill_diagonal_(0)
        assert apart.square().mean() == pytest.approx(1, abs=0.02)
        assert apart.abs().max() < 7


def test_every_bit_of_a_word_is_as_often_0_as_1() -> None:
    words = whole((512, 512)).flatten()
    ones = torch.stack([(words >> bit & 1).sum() for bit in range(32)])
    assert ((ones - words.numel() / 2).abs() / math.sqrt(words.numel() / 4)).max() < 4.5


def test_values_of_bytes_are_all_as_frequent() -> None:
    counts = torch.bincount((whole((512, 512)).flatten() >> 24) + 128, minlength=256).double()
    expected = counts.sum() / 256
    assert ((counts - expected).square() / expected).sum() == pytest.approx(255, abs=4 * math.sqrt(2 * 255))


def test_probabilities_at_the_ends_keep_all_and_nothing() -> None:
    assert whole((64, 64), kind=keep_mask(1.0)).all()
    assert not whole((64, 64), kind=keep_mask(0.0)).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_lie_in_0_to_1_with_1_left_out(dtype: torch.dtype) -> None:
    drawn = whole((512, 512), kind=uniform(dtype))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.double().mean() == pytest.approx(0.5, abs=torch.finfo(dtype).eps + 0.003)
    assert drawn.double().var() == pytest.approx(1 / 12, rel=0.01)
    lowest, highest = of_extremes(uniform(dtype)).tolist()
    assert lowest == 0
    assert highest < 1


def test_normal_numbers_have_the_moments_of_the_normal_distribution() -> None:
    drawn = whole((512, 512), kind=normal(torch.float64))
    for power, moment in enumerate((0, 1, 0, 3), start=1):
        assert drawn.pow(power).mean() == pytest.approx(moment, abs=0.05)
    assert of_extremes(normal(torch.float32)).isfinite().all()


def test_exponential_numbers_are_above_0_and_have_mean_and_variance_1() -> None:
    drawn = whole((512, 512), kind=exponential(torch.float32))
    assert drawn.min() > 0
    assert drawn.mean() == pytest.approx(1, abs=0.01)
    assert drawn.var() == pytest.approx(1, abs=0.03)
    assert (of_extremes(exponential(torch.float32)) > 0).all()
