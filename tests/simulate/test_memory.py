"""Memory by category, from the life of every storage."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from grid import Grid
from meshwise.reference.gpt import GPTConfig
from meshwise.simulate.predicted_memory import RankMemory, fullest, memory_of, memory_table, size_text
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_tape import Category
from simulate.subjects import DEEP, gpt_subject

ZERO = (
    # parameters in billions, ranks, and GB of model states under stages 1, 2, 3: Rajbhandari et al., 2020, table 1
    (7.5, 1, 120, 120, 120),
    (7.5, 4, 52.5, 41.3, 30),
    (7.5, 16, 35.6, 21.6, 7.5),
    (7.5, 64, 31.4, 16.6, 1.88),
    (7.5, 256, 30.4, 15.4, 0.47),
    (7.5, 1024, 30.1, 15.1, 0.12),
    (128, 1, 2048, 2048, 2048),
    (128, 4, 896, 704, 512),
    (128, 16, 608, 368, 128),
    (128, 64, 536, 284, 32),
    (128, 256, 518, 263, 8),
    (128, 1024, 513, 257, 2),
    (1000, 1, 16000, 16000, 16000),
    (1000, 4, 7000, 5500, 4000),
    (1000, 16, 4750, 2875, 1000),
    (1000, 64, 4187, 2218, 250),
    (1000, 256, 4046, 2054, 62.5),
    (1000, 1024, 4011, 2013, 15.6),
)


def _sum(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.float().sum(), len(batch)


def _of(plan: str, *, ranks: int) -> tuple[RankMemory, ...]:
    return memory_of(rehearse(gpt_subject(), plan=plan, ranks=ranks))


@pytest.mark.grid(Grid({"row": ZERO}, heavy=lambda cell: cell["row"][0] > 10))
def test_zero_stores_what_its_paper_says(row: tuple[float, int, float, float, float]) -> None:
    billions, ranks, first, second, third = row
    width = 100_000
    subject = RehearsalSubject(
        lambda: nn.Linear(width, round(billions * 1e9 / width), bias=False),
        _sum,
        torch.empty(ranks, width, device="meta"),
    )
    for stage, published in ((1, first), (2, second), (3, third)):
        plan = f"dp={ranks} zero={stage} precision=fp16"
        [rank] = memory_of(rehearse(subject, plan=plan, ranks=ranks, device="cuda"))
        kept = rank.rest
        # Gradients are kept in fp32 here and in fp16 there; all else is equal.
        states = kept[Category.PARAMETERS] + kept[Category.GRADIENTS] / 2 + kept[Category.OPTIMIZER]
        # As many digits as are printed; whole numbers are cut off there, not rounded.
        assert states / 1e9 == pytest.approx(published, abs=0.9 if published > 100 else 0.06)


def test_a_view_of_split_logits_takes_no_memory() -> None:
    config = GPTConfig(vocabulary=4096, context=16, layers=1, heads=4, width=32)

    def peak(reshape: Callable[[Tensor], Tensor]) -> int:
        def loss(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            summed = functional.cross_entropy(reshape(output), batch[1].flatten(), reduction="sum")
            return summed, batch[1].numel()

        subject = replace(gpt_subject(config), loss=loss)
        return fullest(memory_of(rehearse(subject, plan="tp=4", ranks=4, device="cuda"))).peak.bytes

    assert peak(lambda logits: logits.view(-1, 4096)) == peak(lambda logits: logits.flatten(0, 1))


def test_each_category_is_what_the_plan_keeps_of_it() -> None:
    parameters = sum(p.numel() for p in gpt_subject().model().parameters()) * 4
    [plain] = _of("dp=1", ranks=1)
    assert plain.rest[Category.PARAMETERS] == pytest.approx(parameters, rel=0.01)
    assert plain.rest[Category.GRADIENTS] == pytest.approx(parameters, rel=0.01)
    assert plain.rest[Category.OPTIMIZER] == pytest.approx(2 * parameters, rel=0.01)
    [shared] = _of("dp=4 zero=3", ranks=4)
    for category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER):
        assert shared.rest[category] == pytest.approx(plain.rest[category] / 4, rel=0.1)
    assert 0 < shared.peak.device[Category.GATHERED] < parameters


def test_each_unit_gathered_ahead_is_in_memory() -> None:
    one, two, four = (
        max(moment.device.get(Category.GATHERED, 0) for moment in rank.steady)
        for prefetch in (0, 1, 3)
        for rank in _of(f"dp=4 zero=3 prefetch={prefetch}", ranks=4)
    )
    assert one < two < four


def test_recomputation_leaves_a_block_s_activations_in_place_of_all() -> None:
    plain, again = (_of(plan, ranks=1)[0].peak.device[Category.ACTIVATIONS] for plan in ("dp=1", "dp=1 recompute=full"))
    assert again < 0.6 * plain


def test_an_earlier_stage_of_1f1b_holds_more_micro_batches() -> None:
    ranks = memory_of(rehearse(gpt_subject(DEEP, rows=16, stages=4), plan="pp=4 microbatches=8", ranks=4))
    kept = [rank.peak.device[Category.ACTIVATIONS] for rank in ranks[:-1]]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[1] > kept[2]
    assert fullest(ranks) in ranks


def test_a_step_ends_with_the_memory_that_it_began_with() -> None:
    for plan, size in (("dp=2 zero=3 microbatches=4", 2), ("tp=2", 2), ("dp=2 zero=1", 2)):
        [rank] = memory_of(rehearse(gpt_subject(), plan=plan, ranks=size))
        assert rank.steady[-1].bytes <= rank.steady[0].bytes + 4096


def test_the_table_names_what_there_is() -> None:
    rows = memory_table(_of("dp=2 zero=3", ranks=2))
    assert rows[0][:5] == ("pp", "parameters", "gathered", "gradients", "optimizer")
    assert len(rows) == 2
    assert size_text(4096) == "4.0 KiB"


def test_more_micro_batches_of_a_size_need_no_more_memory() -> None:
    """On the first stage of ZB-H2, some micro-batches have their backward in one part and most in two."""
    few, many = (
        memory_of(rehearse(gpt_subject(rows=rows), plan=f"pp=2 microbatches={rows} schedule=zb-h2", ranks=2))
        for rows in (8, 16)
    )
    assert [rank.peak.bytes for rank in many] == pytest.approx([rank.peak.bytes for rank in few], abs=64)
