"""A schedule of the user's own, read from a file that the plan names: it trains, or no rank starts."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwise.cli.main import main as command
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.pipeline.schedules.named_schedules import make_schedule
from meshwise.plan import Plan, PlanError
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, alone, outcome, run

TABLE = """
    0F0 0F1 .   0B0 0F2 0I1 .   0W1 0B2     # a rank of each kind
    .   1F0 1I0 1F1 1I1 1W1 1W0 1F2 1B2
"""
PLAN = 'pp=2 microbatches=3 schedule="{}"'


def gpt() -> GPT:
    return GPT(GPTConfig(vocabulary=16, context=4, layers=3, heads=2, width=8, mlp_ratio=2)).double()


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(16, (rows, 5), generator=generator) for rows in (6, 4)]
    return [(tokens[:, :-1], tokens[:, 1:].clone()) for tokens in drawn]


def options() -> Options:
    return Options(clip_norm=0.5, example=batches()[0])


def test_a_table_from_a_file_trains_like_one_process(tmp_path: Path) -> None:
    path = tmp_path / "of mine.txt"
    path.write_text(TABLE)

    def main(world: World) -> Any:
        trainer = parallelize(
            gpt, PLAN.format(path), loss=next_token_loss, world=world, options=options(), lr=1e-2, weight_decay=0.1
        )
        return outcome(trainer, batches=batches())

    expected = alone(gpt, batches=batches(), loss=next_token_loss, options=options(), lr=1e-2, weight_decay=0.1)
    for steps in run(2, main):
        agree(steps, expected, bound=1e-9)


def test_a_plan_with_the_path_of_a_table_reads_back() -> None:
    plan = Plan.parse("pp=2 schedule=tables/mine")
    assert plan.schedule == "tables/mine"
    assert Plan.parse(str(plan)) == plan
    spaced = Plan.parse('pp=2, schedule = "my tables/x = 1.txt" microbatches=4')
    assert spaced == Plan(pp=2, schedule="my tables/x = 1.txt", microbatches=4)
    assert Plan.parse(str(spaced)) == spaced
    assert Plan.from_toml(spaced.to_toml()) == spaced
    for path in ("mine/a,b.txt", "mine/pp=4,zero=1.txt", "mine/one;", "mine/two,"):
        plan = Plan(pp=2, schedule=path, microbatches=4)
        assert Plan.parse(str(plan)) == plan
    with pytest.raises(PlanError, match=r"a quote in the plan .* is not closed"):
        Plan.parse('pp=2 schedule="my tables/mine.txt')
    with pytest.raises(PlanError, match=r"schedule=mine: .* or the path of a file, as in ./mine.txt"):
        Plan.parse("pp=2 schedule=mine")


@pytest.mark.parametrize("name", ["1f1b", "dualpipev"])
def test_a_printed_table_can_be_read(name: str, tmp_path: Path) -> None:
    table = make_schedule(name, pp=2, microbatches=4)
    (tmp_path / "mine.txt").write_text(str(table))
    assert make_schedule(str(tmp_path / "mine.txt"), pp=2, microbatches=4) == table


def test_different_tables_on_ranks_are_refused(tmp_path: Path) -> None:
    for rank, text in enumerate((TABLE, TABLE.replace("0I1 .   0W1", "0B1"))):
        (tmp_path / f"{rank}.txt").write_text(text)

    def main(world: World) -> None:
        plan = PLAN.format(tmp_path / f"{world.rank}.txt")
        parallelize(gpt, plan, loss=next_token_loss, world=world, options=options(), lr=1e-2)

    with pytest.raises(PlanError, match="the ranks have different tables"):
        run(2, main)


ONE = "0F0 0F1 0B0 0B1\n"
REFUSED = {
    "numbers": (TABLE.replace("2", "3"), "has no 0F2"),
    "ranks": ("0F0 0B0 0F1 0B1 0F2 0B2", "Nearest that works: 'pp=1 microbatches=3 virtual_stages=1 schedule="),
    "deadlock": (ONE + "1F1 1B0 1F0 1B1", "1B0 before 1F0"),
    "order": ("0B0 0F0\n1F0 1B0", "does 0B0 before 0F0"),
    "words": ("0F0 0G0", "line 1: '0G0' is not an action"),
    "half": (ONE + "1F0 1B0 1F1", "has no backward for stage 1, micro-batch 1"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", ["train", "verify"])
def test_a_faulty_table_is_refused_before_any_rank_starts(
    case: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.txt"
    text, reason = REFUSED[case]
    path.write_text(text)
    assert command([name, f"--plan={PLAN.format(path)}"]) == 2
    output = capsys.readouterr()
    assert reason in output.err
    assert str(path) in output.err
    assert "starting" not in output.out


@pytest.mark.parametrize(
    "plan, reason",
    [
        ("pp=2 schedule=./nowhere.txt", "schedule=./nowhere.txt cannot be read: No such file"),
        ("pp=4 microbatches=6 schedule=interleaved virtual_stages=2", "Nearest that works: 'pp=4 microbatches=8"),
        ("pp=4 microbatches=6 schedule=zb-v virtual_stages=2", "at least 8 micro-batches"),
    ],
)
def test_a_schedule_that_does_not_allow_these_numbers_is_refused(
    plan: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["train", f"--plan={plan}"]) == 2
    output = capsys.readouterr()
    assert reason in output.err
    assert "starting" not in output.out
