"""Balance of the ranks' work, and the command that draws it."""

import pytest
import torch
from torch import Tensor

from meshwise.attention import Pattern, causal, documents, full, window
from meshwise.attention.token_attention import work_table
from meshwise.cli.main import main
from meshwise.plan import Plan


def packed(length: int, *, seed: int) -> Tensor:
    """Document numbers of documents of 16 to 1024 tokens."""
    draw = torch.Generator().manual_seed(seed)
    begins, place = torch.zeros(1, length, dtype=torch.long), 0
    while place < length:
        begins[0, place] = 1
        place += int(torch.randint(16, 1024, (), generator=draw))
    return begins.cumsum(1)


def imbalance(context: str, pattern: Pattern, *, length: int = 4096) -> float:
    return work_table(Plan.parse(f"cp=4 context={context}"), pattern=pattern, length=length).imbalance


@pytest.mark.parametrize("context", ["zigzag", "striped", "gather", "auto"])
def test_causal_work_is_balanced(context: str) -> None:
    assert imbalance(context, causal()) <= 1.02
    assert imbalance(context, full()) <= 1.02


def test_a_contiguous_ring_leaves_the_last_rank_with_most_of_causal_work() -> None:
    assert imbalance("ring", causal()) == pytest.approx(1.75, abs=0.01)


@pytest.mark.parametrize("seed", range(4))
def test_stripes_balance_packed_documents(seed: int) -> None:
    assert imbalance("striped", causal() & documents(packed(4096, seed=seed))) <= 1.10


def test_all_pairs_are_counted_once() -> None:
    table = work_table(Plan.parse("cp=4 context=usp cp_heads=2"), pattern=causal() & window(5), length=1030)
    assert len(table.pairs) == 2
    assert sum(map(sum, table.pairs)) == 5 * 1030 - (4 + 3 + 2 + 1)


def test_draw_attention_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "attention", "--plan", "cp=2 context=ring", "--tokens", "64"]) == 0
    assert "slowest rank over the mean: 1.492" in capsys.readouterr().out


def test_draw_attention_refuses_a_pattern_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "attention", "--plan", "cp=2", "--pattern", "windw:3"]) == 2
    assert "'windw' in the pattern" in capsys.readouterr().err
