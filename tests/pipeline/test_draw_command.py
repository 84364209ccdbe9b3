"""Schedules drawn: as text, as pictures, as a trace, and by the command."""

import json
import sys
from pathlib import Path

import pytest

from meshwise.cli.main import main
from meshwise.pipeline.schedules.named_schedules import make_schedule
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock
from meshwise.view.drawing_data import PlanAccount, write_chrome_trace
from meshwise.view.text_pictures import draw_in_columns

ONE = make_schedule("1f1b", pp=2, microbatches=3)


def test_the_text_is_the_table_over_time() -> None:
    assert draw_in_columns(clock(ONE), width=80).plain == (
        "rank 0 │F0 F1 .  .  B0─── F2 B1─── .  B2─── \n"
        "rank 1 │.  F0 B0─── F1 B1─── F2 B2─── .  .  "
    )  # fmt: skip


def test_links_show_as_gaps_and_long_actions_as_long() -> None:
    assert draw_in_columns(clock(ONE, costs=[ActionCost(2, 1, 1, link=1), ActionCost(1, 1, 1)]), width=80).plain == (
        "rank 0 │F0─── F1─── .  .  .  B0─── F2─── B1─── .  .  .  B2─── \n"
        "rank 1 │.  .  .  F0 B0─── F1 B1─── .  .  .  F2 B2─── .  .  .  "
    )


def test_wide_drawings_are_folded_and_stages_named_where_a_rank_has_several() -> None:
    drawn = draw_in_columns(clock(make_schedule("interleaved", pp=2, microbatches=2)), width=40).plain
    panels = drawn.split("\n\n")
    assert len(panels) == 2
    assert panels[0].startswith("rank 0 │0F0 0F1 2F0 2F1")
    assert max(map(len, drawn.splitlines())) <= 40


def test_a_computation_is_no_dearer_to_draw_among_many() -> None:
    few, many = (drawn_in(ranks) / ranks for ranks in (4, 32))
    assert many < 1.2 * few


def drawn_in(ranks: int) -> int:
    """Calls of functions."""
    timeline = clock(make_schedule("1f1b", pp=ranks, microbatches=64))
    calls, before = 0, sys.getprofile()

    def seen(_frame: object, event: str, _of: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(seen)
    try:
        draw_in_columns(timeline, width=120)
    finally:
        sys.setprofile(before)
    return calls


def test_the_trace_has_every_action_in_its_row_and_an_arrow_for_every_message(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome_trace([PlanAccount("1f1b", clock(ONE, costs=ActionCost(link=0.5)), unit="")], path=path)
    events = json.loads(path.read_text())["traceEvents"]
    bars = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (bars["1F0"]["ts"], bars["1F0"]["dur"], bars["1F0"]["pid"], bars["1F0"]["tid"]) == (1500, 1000, 1, 0)
    assert bars["0SEND_F0"]["tid"] == 1
    assert bars["wait 1RECV_F0"]["dur"] == 1500
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == 6
    assert starts.keys() == ends.keys()
    assert all(ends[message]["ts"] >= starts[message]["ts"] for message in starts)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0: stages 0",
        "rank 1: stages 1",
    }


def test_the_command_draws_a_plan_that_is_not_run_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, trace = "dp=auto pp=4 microbatches=8 schedule=zb-h1", tmp_path / "new" / "a.json"
    words = ["draw", "schedule", f"--plan={plan}", f"--trace={trace}"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "rank 3 │.  .  .  F0 I0 F1 I1" in out
    assert "step 27" in out
    assert "11.1 %" in out
    assert trace.exists()


def test_the_command_draws_a_table_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("0F0 0B0\n1F0 1B0\n")
    assert main(["draw", "schedule", f"--table={path}", "--actions"]) == 0
    assert "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE" in capsys.readouterr().out


CUT = ["draw", "cut", "--model.arguments", "layers=2", "width=8", "heads=2", "--data.context=4"]


def test_the_command_shows_where_a_jobs_model_would_be_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CUT, "--plan=pp=2 microbatches=2 partition=params", "--model.cut-at", "blocks.1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "stage  runs                      parameters  params  part    then sends",
        "0      embedding … blocks.0 (3)  2,864       2,864   50.2 %  blocks.0",
        "1      blocks.1 … head (3)       2,840       2,840   49.8 %",
        "by params, the largest stage is 1.00 times the mean",
    ]


BAD = [
    (["draw"], "name a drawing; choose from: meshwise draw schedule, meshwise draw attention, meshwise draw cut"),
    ([*CUT, "--plan=dp=2"], "the plan 'dp=2' has one stage"),
    ([*CUT, "--plan=pp=13"], "13 stages do not fit: GPT has 12 pieces, so at most pp·virtual_stages=12"),
    ([*CUT, "--plan=pp=2", "--model.cut-at", "block.1"], "a stage cannot begin at 'block.1'; it can at, for"),
    (["draw", "tree"], "unknown drawing 'tree'"),
    (["draw", "schedule"], "give either a plan or a table"),
    (["draw", "schedule", "--plan=pp=4 microbatches=6 schedule=interleaved"], "Nearest that works: 'pp=4"),
    (["draw", "schedule", "--plan=pp=4 microbatchs=6"], "unknown plan key 'microbatchs'; did you mean microbatches?"),
    (["draw", "schedule", "--plan=pp=four"], "pp='four': pp is a whole number"),
    (["draw", "schedule", "--plan=pp"], "'pp' in the plan 'pp' is not key=value"),
    (["draw", "schedule", "--plan=pp=2 schedule=zb"], "schedule=zb: schedule is one of 1f1b"),
    (["draw", "schedule", "--plan=pp=2 microbatches=4 budget=much"], "budget='much': budget is a whole number"),
    (["draw", "schedule", "--plan=pp=2", "--forward=0"], "times have to be above 0"),
    (["draw", "schedule", "--table=nowhere.txt"], "nowhere.txt"),
]  # fmt: skip


@pytest.mark.parametrize("words, message", BAD)
def test_a_drawing_that_fails_is_one_message_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    output = capsys.readouterr().err
    assert message in output
    assert "Traceback" not in output
