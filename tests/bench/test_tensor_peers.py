"""The benchmark beside other tensor parallelism: its games can be played, and its table says what was measured."""

import pytest

from games import table
from peer_table import Pair
from tensor_contestants import contestant
from tensor_peers import EVENT, GAMES


def pair(ours: float, peer: float) -> Pair:
    return Pair("torch DTensor", 0, ours, peer, ours, peer, (100.0,), (200.0,))


def test_every_game_is_between_contestants() -> None:
    for game in GAMES:
        assert game.ours.package == "meshwise"
        assert contestant(game.peer.name) == game.peer


def test_an_unknown_contestant_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="no contestant 'ours'; there are meshwise 1d"):
        contestant("ours")


def test_a_line_is_the_median_of_the_paired_ratios() -> None:
    text = table({GAMES[0]: [pair(1.0, 2.0), pair(3.0, 4.0), pair(9.0, 10.0)]}, remarks=["said"])
    assert "| 2 | meshwise 1d | torch DTensor |" in text
    assert "**0.750** (0.625–0.825)" in text
    assert text.endswith("- said\n")


def test_games_that_were_not_played_have_no_line() -> None:
    assert table({GAMES[0]: []}, remarks=[]).count("\n") == 3


def test_the_command_line_has_defaults() -> None:
    assert EVENT.parse([]).rounds == 3
