"""Balance of the ranks' work, and the command that draws it."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from meshwise.attention import Pattern, attend, causal, documents, full, window
from meshwise.attention.context_parallel import ContextParallel
from meshwise.attention.cp_attention import work_table
from meshwise.cli.main import main
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.world import World
from meshwise.layout.layout import TokenRanges, token_order
from meshwise.model.random_draws import SampleRows
from meshwise.plan import Plan
from meshwise.testing import run


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


IDS = packed(4096, seed=0)
PLACES = torch.arange(4096)[None]
BEGINS = (IDS.diff(prepend=IDS[:, :1] - 1) != 0).nonzero()[:, 1]
WAYS = {
    "position_ids": {"input_ids": PLACES, "position_ids": PLACES - BEGINS[IDS - 1]},
    "ids": ((PLACES, IDS), PLACES),
    "cu_seqlens": {"tokens": PLACES, "cu_seqlens": torch.cat((BEGINS, torch.tensor([4096])))[None]},
}


@pytest.mark.parametrize("way", [*WAYS, "none"])
def test_auto_balances_documents_in_every_way_in_which_they_are_given(way: str) -> None:
    def main_of(world: World) -> TokenRanges:
        context = ContextParallel(Plan.parse("cp=4"), world=world.over(Plan.parse("cp=4").mesh()))
        with context.mode.running(SampleRows(0, 1)):
            context.on_own_tokens(lambda *_: None)(None, WAYS.get(way, {"tokens": PLACES}))
            assert context.mode.state is not None
            return context.mode.state.own

    order = "zigzag" if way == "none" else "striped"
    assert run(4, main_of) == list(token_order(order, length=4096, parts=4))
    assert imbalance(order, causal() & documents(IDS)) <= 1.10 or way == "none"


@pytest.mark.parametrize(
    "context, part, forward, backward",
    [
        ("gather", 3 / 4, (0, 3 / 4), (0, 2 * 3 / 4)),
        *((name, 0, (0, 3 / 4), (0, 7 / 4)) for name in ("ring", "zigzag", "striped", "auto")),
        ("ulysses", 3 / 4, (3 / 16, 0), (3 / 16, 0)),
        ("usp cp_heads=2", 1 / 2, (1 / 8, 1 / 4), (1 / 8, 3 / 4)),
    ],
)
def test_a_layer_receives_the_elements_of_the_formula(
    context: str, part: float, forward: tuple[float, float], backward: tuple[float, float]
) -> None:
    """N = 4. `part`: what a rank receives of a tensor of a record. `forward`, `backward`: factors of 2Q+K and of K."""
    length, heads, kv_heads, width = 32, 8, 4, 6
    k_elements, q_elements = 2 * kv_heads * length * width, heads * length * width

    def received(records: Sequence[CallRecord]) -> float:
        return sum((record.bytes / 4 * {"send": 0, "recv": 1}.get(record.kind, part) for record in records), 0.0)

    def main_of(world: World) -> tuple[float, float]:
        plan = Plan.parse(f"cp=4 context={context}")
        world = world.over(plan.mesh())
        split = ContextParallel(plan, world=world)
        groups, lines = split.attention.connections()
        world.prepare(groups=groups, lines=lines)
        shapes = [(1, n, length // 4, width) for n in (heads, kv_heads, kv_heads)]
        q, k, v = (torch.randn(shape, device=world.device, requires_grad=True) for shape in shapes)
        with split.mode.running(SampleRows(0, 1)):
            split.on_own_tokens(lambda *_: None)(torch.nn.Identity(), torch.zeros(1, length))
            with world.record() as there:
                out = attend(q, k, v, pattern=causal())
            with world.record() as back:
                out.sum().backward()
        return received(there), received(back)

    expected = tuple(a * (2 * q_elements + k_elements) + b * k_elements for a, b in (forward, backward))
    assert run(4, main_of) == [expected] * 4


def test_all_pairs_are_counted_once() -> None:
    table = work_table(Plan.parse("cp=4 context=usp cp_heads=2"), pattern=causal() & window(5), length=1030)
    assert len(table.pairs) == 2
    assert sum(map(sum, table.pairs)) == 5 * 1030 - (4 + 3 + 2 + 1)


def test_draw_attention_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "attention", "--plan", "cp=2 context=ring", "--tokens", "64"]) == 0
    assert "slowest rank over the mean: 1.492" in capsys.readouterr().out


def test_draw_attention_refuses_a_pattern_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "attention", "--plan", "cp=2", "--pattern", "windw:3"]) == 2
    assert "'windw' in pattern 'windw:3' is not one of" in capsys.readouterr().err
