"""The benchmark beside other pipelines: its games can be played, and its tables say what was found."""

import itertools

import pytest

from games import table
from gpt import Shape
from peer_table import Pair
from pipeline_contestants import contestant, cut
from pipeline_peers import EVENT, GAMES, peaks


def test_every_game_is_between_contestants() -> None:
    for game in GAMES:
        assert game.ours.package == "meshwise"
        assert contestant(game.peer.name) == game.peer
    assert {game.ranks for game in GAMES} == {2, 4}
    assert {game.peer.package for game in GAMES} == {"meshwise", "torch", "deepspeed"}


def test_an_unknown_contestant_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="no contestant 'ours'; there are meshwise gpipe"):
        contestant("ours")


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_peers_largest_stage_is_as_small_as_any_cut_makes_it(stages: int) -> None:
    """In blocks: the embedding takes nothing, the head as many multiplications as 1.23 blocks."""
    costs = [0.0, *[1.0] * 8, 512 * 8192 / (12 * 512**2 + 2 * 256 * 512)]
    largest = max(sum(costs[a:b]) for a, b in itertools.pairwise(cut(Shape(), stages=stages)))
    assert largest == pytest.approx({2: 5.0, 4: 3.0, 8: 2.0}[stages])


def test_the_tables_have_the_ratio_and_what_each_rank_took_at_most() -> None:
    pairs = {
        GAMES[0]: [
            Pair("torch GPipe", 0, 1.0, 2.0, 1.0, 2.0, (500.0, 400.0), (300.0, 600.0)),
            Pair("torch GPipe", 0, 3.0, 4.0, 3.0, 4.0, (450.0, 450.0), (300.0, 610.0)),
        ]
    }
    text = table(pairs, remarks=["said"], more=peaks(pairs))
    assert "| 2 | meshwise gpipe | torch GPipe | ScheduleGPipe |" in text
    assert "**0.625** (0.562–0.688) | 0.625 | 500 | 610 |" in text
    assert "| 2 | meshwise gpipe | 500 450 |" in text
    assert "| 2 | torch GPipe | 300 610 |" in text


def test_the_command_on_the_page_has_no_path_of_a_machine() -> None:
    arguments = EVENT.parse(["--rounds", "1", "--only", "4 ranks", "--python", "deepspeed=/home/someone/bin/python"])
    assert EVENT.command(arguments) == (
        "python benchmarks/pipeline_peers.py --rounds 1 --pairs 6 --steps 2 --warmup 3 --only '4 ranks' "
        "--python deepspeed=PYTHON"
    )


def test_games_that_nobody_can_play_are_named() -> None:
    with pytest.raises(SystemExit, match="no such game; there are meshwise gpipe beside torch GPipe at 2 ranks"):
        EVENT.chosen(["nobody"], {"torch": "python"})
