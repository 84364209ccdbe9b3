"""What is drawn: which shapes a picture has, where, and that a file of each kind comes of it."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import pytest

from meshwise.base.mesh import Mesh
from meshwise.pipeline.schedules.named_schedules import make_schedule
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock
from meshwise.simulate.cluster import Device
from meshwise.simulate.predicted_memory import fullest, size_text
from meshwise.view.drawing_data import PlanAccount, comparison_table, predicted_account, write_chrome_trace
from meshwise.view.picture import COLORS, UNSEEN, Bars, Picture, PictureText, svg_file, ticks, write_png
from meshwise.view.plan_pictures import mesh_picture, picture_sheet, pictures, timeline_picture
from meshwise.view.text_pictures import SHADES, draw_to_scale
from view.accounts import SHARDED, SPLIT, account, prediction


def both() -> list[PlanAccount]:
    return [account(SPLIT), account(SHARDED)]


def bars_of(picture: Picture, paint: str) -> list[Bars]:
    """Without those of the legend."""
    return [shape for shape in picture.flat() if isinstance(shape, Bars) and shape.paint == paint and shape.names]


def test_a_plan_fits_the_device_without_the_memory_of_libraries() -> None:
    """Libraries take a part of a device, which is not there for a plan."""
    made = prediction(SHARDED)
    needed = fullest(made.memory).peak.bytes
    for less, fits in ((0, "yes"), (1, "no")):
        device = dataclasses.replace(made.cluster.device, own=2**30, memory=float(2**30 + needed - less))
        shown = predicted_account(dataclasses.replace(made, cluster=dataclasses.replace(made.cluster, device=device)))
        assert shown.facts["fits"] == fits
        assert shown.room == needed - less
        assert shown.facts["peak memory"] == f"{size_text(needed + 2**30)} of {size_text(device.memory)}"


def test_a_device_without_a_memory_size_has_enough() -> None:
    made = prediction(SHARDED)
    device = Device(peak={"float32": 1e12})
    shown = predicted_account(dataclasses.replace(made, cluster=dataclasses.replace(made.cluster, device=device)))
    assert shown.facts["fits"] == "yes"
    assert " of " not in shown.facts["peak memory"]
    assert "limit" not in [getattr(shape, "paint", "") for shape in picture_sheet([shown]).flat()]


def test_a_timeline_is_drawn_to_scale_a_row_for_each_rank() -> None:
    timeline = clock(make_schedule("1f1b", pp=2, microbatches=2))
    picture = timeline_picture(timeline, title="1f1b", unit="")
    first, second = bars_of(picture, "forward")
    plot = picture.plot
    assert plot is not None
    assert (first.row, first.names, second.row) == ("rank 0", ("0F0", "0F1"), "rank 1")
    unit = plot.width / timeline.seconds
    assert [box[0] - plot.left for box in first.boxes] == pytest.approx([0, unit])
    assert [box[2] for box in first.boxes] == pytest.approx([unit, unit])
    assert second.boxes[0][1] > first.boxes[0][1] + first.boxes[0][3]
    assert "F0" in [shape.text for shape in picture.flat() if isinstance(shape, PictureText)]


def test_stages_of_one_rank_and_parts_of_a_backward_have_their_own_colours() -> None:
    picture = timeline_picture(clock(make_schedule("zb-v", pp=2, microbatches=4)), title="zb-v", unit="")
    assert all(bars_of(picture, paint) for paint in ("forward", "forward-2", "input", "weights-2"))
    assert "0F0" in [shape.text for shape in picture.flat() if isinstance(shape, PictureText)]


def test_the_area_of_memory_is_as_high_as_the_peak() -> None:
    memory = [picture for picture in next(pictures(both()[:1])) if picture.title.startswith("memory of ranks 0–3")]
    plot, history = memory[0].plot, both()[0].histories[0]
    assert plot is not None
    tops = [min(y for _, y in shape.points) for shape in plot.shapes if not isinstance(shape, Bars | PictureText)]
    most = max(one.peak.bytes for one in both()[0].histories)
    assert plot.height - min(tops) == pytest.approx(plot.height * history.peak.bytes / (1.05 * most))
    entries = [shape for shape in plot.shapes if isinstance(shape, Bars)]
    assert [bars.paint for bars in entries] == [UNSEEN]
    assert any(name.startswith("1") and "activations" in name for name in entries[0].names)


def test_a_mesh_has_a_cell_for_every_rank_and_a_colour_for_every_node() -> None:
    picture = mesh_picture(Mesh.of(pp=2, dp=2, tp=2), ranks_per_node=4)
    numbers = [shape.text for shape in picture.shapes if isinstance(shape, PictureText) and shape.text.isdecimal()]
    assert sorted(numbers) == [str(rank) for rank in range(8)]
    assert "rank 5: pp 1 dp 0 tp 1, node 1" in bars_of(picture, "node-1")[0].names
    assert len(bars_of(picture, "node-0")[0].boxes) == 4


@pytest.mark.parametrize(
    "mesh", [Mesh.of(dp=1), Mesh.of(pp=64, dp=6, tp=8), Mesh.of(pp=2, dp=3, depth=2, row=2, col=9)]
)
def test_a_mesh_of_any_size_fits_a_page_and_its_last_rank_is_there(mesh: Mesh) -> None:
    picture = mesh_picture(mesh, ranks_per_node=8)
    texts = [shape.text for shape in picture.shapes if isinstance(shape, PictureText)]
    assert picture.width <= 1300
    assert str(mesh.size - 1) in texts or texts[0].endswith("grids")
    assert "0" in texts


def test_plans_are_compared_by_what_differs_and_the_parts_of_a_step_add_up() -> None:
    table = {row[0]: row[1:] for row in comparison_table(both())}
    assert table["zero"] == ("1", "3")
    assert "schedule" not in table  # both have the same
    assert list(table).index("computes") < list(table).index("waits for dp") < list(table).index("bubble")
    shares = [float(re.search(r"\(([\d.]+) %\)", row[0])[1]) for row in table.values() if "%)" in row[0]]  # type: ignore[index]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert table["fits"] == ("yes", "yes")
    assert table["gathered"][0] == "0 B" != table["gathered"][1]


def test_a_file_of_each_kind_is_written(tmp_path: Path) -> None:
    picture = picture_sheet(both())
    tree = ET.fromstring(svg_file(picture))
    titles = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {*(one.title for one in both()), "8 ranks, 4 to a node"} <= set(titles)
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    write_png(picture_sheet(both()[1:]), path=tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_every_paint_has_a_colour() -> None:
    paints = {shape.paint for shape in picture_sheet(both()).flat()}
    assert paints <= {*COLORS, UNSEEN}


def test_memory_is_a_counter_of_the_trace(tmp_path: Path) -> None:
    write_chrome_trace(both(), path=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert {event["pid"] for event in counters} == {0, 1, 2}  # two stages of the first plan, one of the second
    assert (
        max(sum(event["args"].values()) for event in counters if event["pid"] == 2) == both()[1].histories[0].peak.bytes
    )
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names[2] == f"{SHARDED}: ranks 0–7: stages 0"


def test_a_row_of_the_trace_has_one_thing_at_a_time_or_one_within_another(tmp_path: Path) -> None:
    zb_v = PlanAccount("zb-v", clock(make_schedule("zb-v", pp=2, microbatches=4), costs=ActionCost(link=0.7)), unit="")
    write_chrome_trace([*both(), zb_v], path=tmp_path / "trace.json")
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len([row for row in rows if row[1] == 0]) == 5  # a rank each
    for (_, row), spans in rows.items():
        open_until: list[float] = []
        for start, stop in sorted(spans, key=lambda span: (span[0], -span[1])):
            open_until = [end for end in open_until if end > start + 1e-6]
            assert all(stop <= end + 1e-6 for end in open_until)
            assert row == 0 or not open_until
            open_until.append(stop)


def test_the_terminal_shows_each_rank_by_letters() -> None:
    timeline = both()[0].timeline
    lines = draw_to_scale(timeline, width=90, seconds=timeline.seconds, rows=both()[0].names).plain.splitlines()
    rows = [line for line in lines if line.startswith("ranks ")]
    assert [row[:11] for row in rows] == ["ranks 0–3 │", "ranks 4–7 │"]
    assert all("░" in row and "F" in row for row in rows)
    assert max(map(len, lines)) <= 92
    entries = "  ".join(line.strip() for line in lines[len(rows) :]).split("  ")
    assert {entry[0] for entry in entries} == {letter for row in rows for letter in row.partition("│")[2]} & set(SHADES)


def test_round_numbers_are_1_2_or_5_apart() -> None:
    assert ticks(57, most=10) == [0, 10, 20, 30, 40, 50]
    assert ticks(1.0, most=10) == pytest.approx([step / 10 for step in range(11)])
    assert ticks(0.0123, most=4) == pytest.approx([0, 0.005, 0.01])


def test_a_drawing_without_memory_or_mesh_is_a_timeline() -> None:
    schedule = PlanAccount("1f1b", clock(make_schedule("1f1b", pp=2, microbatches=2)), unit="")
    assert len(next(pictures([schedule]))) == 1
    assert [row[0] for row in comparison_table([schedule])] == ["", "step", "computes", "bubble"]
