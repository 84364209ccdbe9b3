"""The benchmark against peers: its arithmetic, its table, its refusals, and one small match."""

import socket
import statistics
from pathlib import Path

import pytest

import contestants
from bench.warm_team import start
from gpt import Shape
from peer_table import Pair, markdown, summarise, write_between_markers
from peers import check_losses, command, main, parse
from team import ContestantFailed, Team

DRAWN = """
    ours   peer   ratio
    1.00   2.00   0.50
    3.00   4.00   0.75
    5.00   4.00   1.25
"""


def pairs(peer: str = "torch DDP") -> list[Pair]:
    rows = [[float(word) for word in line.split()] for line in DRAWN.splitlines()[2:]]
    return [Pair(peer, 0, ours, its, 4 * ours, 8 * its, (50, 100 + ours), (200 - its, 50)) for ours, its, _ in rows]


def test_the_ratio_is_the_median_of_paired_ratios_not_the_ratio_of_medians() -> None:
    [line] = summarise(pairs())

    ratios = [pair.ours_seconds / pair.peer_seconds for pair in pairs()]
    assert line.quartiles[1] == statistics.median(ratios) == 0.75
    assert line.quartiles == (0.625, 0.75, 1.0)
    assert (line.ours_seconds, line.peer_seconds) == (3.0, 4.0)
    assert line.processor == 0.375
    assert (line.ours_megabytes, line.peer_megabytes) == (105.0, 198.0), "the highest peak counts"


def test_lines_stand_in_the_order_of_the_contestants_and_only_for_those_that_played() -> None:
    lines = summarise([*pairs("DeepSpeed ZeRO-1"), *pairs("torch DDP")])
    assert [(line.peer, line.stage) for line in lines] == [("torch DDP", 0), ("DeepSpeed ZeRO-1", 1)]


def test_one_pair_makes_a_line_too() -> None:
    assert summarise(pairs()[:1])[0].quartiles == (0.5, 0.5, 0.5)


def test_the_table_goes_between_its_markers_and_nothing_else_changes(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("before\n<!-- peers: begin -->\nold\n<!-- peers: end -->\nafter\n")

    text = markdown(summarise(pairs()), remarks=["a remark"])
    write_between_markers(page, text=text)

    assert page.read_text() == f"before\n<!-- peers: begin -->\n{text}<!-- peers: end -->\nafter\n"
    assert "| `zero=0` | torch DDP |" in text
    assert "**0.750** (0.625–1.000)" in text


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text")
    with pytest.raises(ValueError, match="needs the lines <!-- peers: begin -->"):
        write_between_markers(page, text="table")
    assert page.read_text() == "text"


def test_who_computes_something_else_is_disqualified() -> None:
    check_losses("a peer", losses=[9.0, 8.0001], reference=[9.0, 8.0])
    with pytest.raises(ContestantFailed, match=r"a peer: disqualified, loss 8.001000 at step 1, plain torch has 8.0"):
        check_losses("a peer", losses=[9.0, 8.001], reference=[9.0, 8.0])
    with pytest.raises(ContestantFailed, match="loss nan"):
        check_losses("a peer", losses=[float("nan")], reference=[9.0])


def test_every_stage_has_a_peer_that_needs_nothing_but_torch() -> None:
    assert {peer.stage for peer in contestants.PEERS if peer.package == "torch"} == {0, 1, 2, 3}
    assert [ours.stage for ours in contestants.OURS] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--only", "nobody"], "no such peer; there are torch DDP"),
        (["--python", "deepspeed"], "expected KEY=VALUE"),
        (["--python", "fastmoe=/x"], "a key of deepspeed, fairscale"),
        (["--shape", "depth=3"], "a key of layers, width"),
        (["--ranks", "3"], "does not divide by 3 ranks"),
    ],
)
def test_bad_arguments_end_with_one_line(words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        main(words)


def test_the_command_on_the_page_has_no_path_of_a_machine() -> None:
    words = ["--rounds", "1", "--only", "zero=1", "--python", "deepspeed=/home/someone/bin/python"]
    assert command(parse(words)) == (
        "python benchmarks/peers.py --rounds 1 --pairs 6 --steps 2 --ranks 4 --only zero=1 --python deepspeed=PYTHON"
    )


def test_nobody_can_take_the_port_at_which_a_team_will_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[str]()

    def start(_team: Team, _python: str, environment: dict[str, str]) -> None:
        tried.append(environment["MASTER_PORT"])
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind((environment["MASTER_ADDR"], int(tried[-1])))

    monkeypatch.setattr(Team, "_start", start)
    with Team(contestants.PEERS[0], python="", shape=Shape(), ranks=2):
        assert len(tried) == 2


SMALL = ["layers=1", "width=32", "heads=2", "sequence=16", "vocabulary=64", "batch=4"]


@pytest.mark.processes
def test_a_small_match_is_played_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Team, "_start", start)
    page = tmp_path / "benchmarks.md"
    page.write_text("<!-- peers: begin -->\n<!-- peers: end -->\n")
    words = ["--ranks", "1", "--rounds", "1", "--pairs", "1", "--steps", "1", "--only", "tuned", "--docs", str(page)]

    status = main([*words, *(word for size in SMALL for word in ("--shape", size))])

    told = capsys.readouterr()
    assert status == 0, told.err
    assert "| `zero=0` | torch DDP, tuned |" in page.read_text()
    assert "GPT of 1 layers, width 32" in page.read_text()
