"""The page, opened in a headless Chromium: what it shows, that it answers, and that it asks the network for nothing."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from meshwise.view.plan_pictures import page
from view.accounts import SHARDED, SPLIT, account

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --window-size=1300,900
"""

LISTEN = """<script>
window.wrong = [];
addEventListener("error", (event) => wrong.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => wrong.push(event.blockedURI));
console.error = console.warn = (...words) => wrong.push(words.join(" "));
</script>"""

PROBE = """<script>
const shown = () => (document.querySelector("#note").hidden ? "" : document.querySelector("#note").innerText);
const point = (type, node, x, y) =>
  node.dispatchEvent(new PointerEvent(type, { clientX: x, clientY: y, bubbles: true, button: 0, pointerId: 1 }));
const press = (node, key) => node.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const seen = {};
const plan = document.querySelector(".plan"), picture = plan.querySelector("svg.picture");
const plot = plan.querySelector(".plot"), box = plot.getBoundingClientRect();
const times = () => Array.from(plan.querySelectorAll(".axis text"), (text) => text.textContent);
seen.rows = Array.from(document.querySelectorAll(".plan"), (one) =>
  [...new Set(Array.from(one.querySelector(".plot").querySelectorAll("[data-row]"), (path) => path.dataset.row))]);
seen.tables = Array.from(document.querySelectorAll("tbody tr"), (row) => row.innerText.split("\\t"));
seen.labels = Array.from(plan.querySelectorAll(".texts text"), (text) => text.textContent);
const scale = box.width / plot.viewBox.baseVal.width;
const outline = plot.querySelector("path.forward").getAttribute("d");
const [x, y, width] = outline.match(/M(\\S+) (\\S+?)h([\\d.]+)/).slice(1).map(Number);
point("pointermove", plot, box.left + scale * (x + 0.01 * width), box.top + scale * (y + 5));
seen.pointed = shown();
point("pointerleave", picture, 0, 0);
seen.left = shown();
picture.focus();
press(picture, "ArrowRight"); press(picture, "ArrowRight");
seen.walked = shown();
press(picture, "Escape");
seen.escaped = shown();
seen.before = times();
plan.querySelector(".bar button").click();
seen.stretched = Array.from(plan.querySelectorAll(".plot"), (one) => one.getAttribute("viewBox"));
seen.after = times();
press(picture, "0");
seen.whole = plot.getAttribute("viewBox");
point("pointerdown", plot, box.left + 0.5 * box.width, box.top + 5);
point("pointermove", plot, box.left + 0.75 * box.width, box.top + 5);
point("pointerup", plot, box.left + 0.75 * box.width, box.top + 5);
seen.dragged = plot.viewBox.baseVal.x / plot.width.baseVal.value;
const memory = plan.querySelectorAll(".plot")[1], place = memory.getBoundingClientRect();
point("pointermove", memory, place.left + 0.3 * place.width, place.top + 10);
seen.memory = shown();
const mesh = plan.querySelector("svg.picture:has(.node-1)");
const cell = mesh.querySelector(".node-1").getBoundingClientRect();
point("pointermove", mesh, cell.left + 4, cell.top + 4);
seen.mesh = shown();
seen.loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
seen.wide = document.documentElement.scrollWidth <= innerWidth;
seen.wrong = wrong;
document.body.append(Object.assign(document.createElement("pre"), { id: "seen", textContent: JSON.stringify(seen) }));
</script>"""


@pytest.fixture(scope="module")
def text() -> str:
    return page([account(SPLIT), account(SHARDED)], title="Two plans & a <cluster>")


@pytest.fixture(scope="module")
def seen(text: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if BROWSER is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    folder: Path = tmp_path_factory.mktemp("page")
    (folder / "page.html").write_text(text.replace("<head>", f"<head>{LISTEN}").replace("</body>", f"{PROBE}</body>"))
    words = [BROWSER, *FLAGS.split(), f"--user-data-dir={folder / 'user'}", "--dump-dom", f"file://{folder}/page.html"]
    dom = subprocess.run(words, capture_output=True, text=True, timeout=200, check=True).stdout
    found = re.search(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, dom[-2000:]
    result: dict[str, Any] = json.loads(unescape(found[1]))
    return result


def test_nothing_goes_wrong_and_nothing_is_loaded(seen: dict[str, Any]) -> None:
    assert seen["wrong"] == []
    assert seen["loaded"] == []
    assert seen["wide"]


def test_there_is_a_row_for_every_rank_and_its_actions_are_named(seen: dict[str, Any]) -> None:
    assert seen["rows"] == [["ranks 0–3", "ranks 4–7"], ["ranks 0–7"]]
    step = account(SPLIT).timeline
    assert {"F0", "B3"} <= set(seen["labels"])
    assert len(step.computing[0]) == 8


def test_the_bar_under_the_pointer_is_named(seen: dict[str, Any]) -> None:
    event = account(SPLIT).timeline.computing[0][0]
    name, where = seen["pointed"].split("\n")
    assert name == "0F0"
    assert where.startswith("ranks 0–3, from ")
    assert seen["left"] == ""
    milliseconds = float(re.search(r"from ([\d.]+) ms", where)[1])  # type: ignore[index]
    assert milliseconds == pytest.approx(1e3 * event.start, rel=2e-3)
    assert "activations" in seen["memory"]
    assert re.match(r"rank 4: pp 1 dp 0 tp 0, node 1", seen["mesh"])


def test_keys_walk_from_action_to_action(seen: dict[str, Any]) -> None:
    assert seen["walked"].startswith("0F0\nranks 0–3")  # after `begin`
    assert seen["escaped"] == ""


def test_time_is_stretched_in_all_pictures_of_a_plan_at_once(seen: dict[str, Any]) -> None:
    widths = {tuple(map(float, box.split()))[2] for box in seen["stretched"]}
    assert widths == {530.0}  # half of the plot
    assert seen["before"] != seen["after"]
    assert seen["whole"].startswith("0 0 1060 ")
    assert seen["dragged"] == pytest.approx(0.5, abs=0.01)


def test_the_plans_are_compared_in_a_table(seen: dict[str, Any]) -> None:
    rows = {row[0]: row[1:] for row in seen["tables"]}
    assert rows["zero"] == ["1", "3"]
    assert len(rows["bubble"]) == 2


def test_without_scripts_it_has_all_tables_and_pictures_and_names_are_escaped(text: str) -> None:
    still = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert still.count("<svg xmlns") == 2 * 3 + 1  # of each plan time, memory and mesh, and a stage more
    assert still.count("<table>") == 1
    assert "Two plans &amp; a &lt;cluster&gt;" in still
    assert "prefers-color-scheme:dark" in still


def test_the_file_names_no_other(text: str) -> None:
    places = re.findall(r"""(?:href|src|url)\s*[=(]\s*["']?([^"')>]*)""", text)
    assert set(places) <= {"data:,"}
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
