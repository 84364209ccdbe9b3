"""Test the notations of a plan; a plan that cannot work is refused with the nearest plan that works."""

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from meshwise import Mesh, Plan, PlanError, parallelize
from meshwise.plan import AXES, plan
from meshwise.plan.compatibility import COMPATIBILITY, Refusal
from meshwise.plan.plan_keys import OFFLOADABLE, TIERS, WIRE_CODECS, Offload, keys_of
from plans_page import plans_page

DOCS = Path(__file__).parent.parent / "docs"


def plans() -> st.SearchStrategy[Plan]:
    degree = st.one_of(st.none(), st.integers(1, 64))
    return st.builds(Plan, dp=degree, zero=st.integers(0, 3), microbatches=st.integers(1, 8))


@pytest.fixture
def all_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty compatibility table every combination of degrees can be asked about."""
    monkeypatch.setattr(plan, "COMPATIBILITY", ())


@given(plans())
def test_a_plan_prints_and_parses_back(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


@given(plans())
def test_a_plan_goes_through_toml(plan: Plan) -> None:
    assert Plan.from_toml(tomllib.loads(tomlkit.dumps(plan.to_toml()))) == plan


@pytest.mark.parametrize("text", ["dp=2,zero=1", "dp=2, zero=1,", "DP=2 Zero=1", "dp = 2 zero= 1", " dp=2;zero=1"])
def test_unambiguous_spellings_are_read(text: str) -> None:
    assert Plan.parse(text) == Plan(dp=2, zero=1)
    tiers = Plan.parse(f"{text.strip(' ,')},offload=optimizer:cpu,masters:cpu,TP-MODE=2d")
    assert tiers == Plan(dp=2, zero=1, offload="optimizer:cpu,masters:cpu", tp_mode="2d")


def test_text_toml_and_keywords_are_one_value() -> None:
    assert Plan.parse("zero=1 dp=2") == Plan.from_toml({"dp": 2, "zero": 1}) == Plan(dp=2, zero=1)
    assert Plan.parse("dp=auto") == Plan.from_toml({"dp": "auto"}) == Plan(dp=None)


def test_a_plan_prints_its_shortest_line() -> None:
    assert str(Plan()) == "dp=1"
    assert str(Plan(dp=None, zero=3)) == "dp=auto zero=3"
    assert str(Plan(zero=2, dp=1)) == "zero=2"
    assert str(Plan(microbatches=4, dp=2)) == "dp=2 microbatches=4"


def test_a_plan_has_a_mesh_of_all_five_axes() -> None:
    assert str(Plan(dp=4, zero=1).mesh()) == "pp=1 dp=4 cp=1 tp=1"
    with pytest.raises(ValueError, match=r"resolve\(world_size\) fills in dp=auto"):
        Plan(dp=None).mesh()


def test_the_table_of_keys_names_every_codec_and_every_part_of_the_state() -> None:
    wire, offload = (keys_of(Plan)[key].form for key in ("wire", "offload"))
    assert re.findall(r"`(\w+)[:`]", wire) == [*WIRE_CODECS]
    assert re.findall(r"\w+", offload.partition("commas:")[2]) == [*OFFLOADABLE, *TIERS[1:]]


def tiers_texts() -> st.SearchStrategy[str]:
    words = st.dictionaries(st.sampled_from(OFFLOADABLE), st.sampled_from(TIERS), min_size=1)
    return words.map(lambda given: ",".join(f"{what}:{tier}" for what, tier in given.items()))


@given(tiers_texts())
def test_tiers_print_and_parse_back(text: str) -> None:
    try:
        tiers = Offload.parse(text)
    except PlanError as error:
        nearest = re.search(r"'offload=(.*)'", str(error))
        assert nearest is not None
        tiers = Offload.parse(nearest[1])
    assert Offload.parse(str(tiers)) == tiers


def test_tiers_follow_from_the_tier_of_the_update() -> None:
    assert Offload.parse("optimizer:disk") == Offload("disk", "disk", "cpu")
    assert Offload.parse("params:disk") == Offload("cpu", "cpu", "cpu", "disk")
    assert Offload.parse("gradients:cpu") == Offload(gradients="cpu")
    assert Plan(zero=3, offload="params:disk,optimizer:cpu") == Plan(zero=3, offload="params:disk")


@pytest.mark.usefixtures("all_axes")
def test_tp_is_a_grid_of_axes() -> None:
    grids = {
        "tp=4": {"tp": 4},
        "tp=4 tp_mode=2d": {"row": 2, "col": 2},
        "tp=8 tp_mode=2.5d tp_depth=2": {"depth": 2, "row": 2, "col": 2},
        "tp=8 tp_mode=3d": {"i": 2, "j": 2, "l": 2},
    }
    for text, grid in grids.items():
        plan = Plan.parse(f"dp=3 {text}")
        assert plan.mesh().axes == Mesh.of(pp=1, dp=3, cp=1, **grid).axes
        assert plan.tensor_axes == tuple(grid)
    assert Plan.parse("tp=8 tp_mode=3d").row_axes == ("dp", "i", "j")
    plan = Plan.parse("dp=2 tp=2")._unchecked({"cp": 2})  # cp is not built yet
    assert plan.token_axes == ("cp",)
    assert plan.loss_axes == ("dp", "cp")
    assert plan.replica_axes == ("dp", "cp")


def test_auto_fills_the_world() -> None:
    assert Plan.parse("dp=auto zero=3").resolve(4) == Plan(dp=4, zero=3)
    assert Plan(dp=4).resolve(4) == Plan(dp=4)


FOLDS = {
    "dp=4 ep=2": "pp=1 dp_outer=2 dp_ep=2 cp=1 tp=1",
    "dp=2 ep=2": "pp=1 dp=2 cp=1 tp=1",
    "dp=2 tp=2 ep=4": "pp=1 dp=2 cp=1 tp=2",
    "dp=4 tp=4 ep=4 etp=2": "pp=1 dp_outer=2 dp_ep=2 cp=1 tp_ep=2 tp_etp=2",
    "tp=8 ep=2 etp=2": "pp=1 dp=1 cp=1 tp_outer=2 tp_ep=2 tp_etp=2",
    "dp=2x2 ep=2 zero=1": "pp=1 dp_outer=2 dp_ep=2 cp=1 tp=1",
    "dp=2x6 ep=3 zero=1": "pp=1 dp_outer=2 dp_shard=2 dp_ep=3 cp=1 tp=1",
    "dp=6x2 ep=4 zero=1": "pp=1 dp_outer=3 dp_ep=2 dp_shard=2 cp=1 tp=1",
    "dp=2x2 tp=2 ep=8 zero=1": "pp=1 dp_ep=2 dp_shard=2 cp=1 tp=2",
    "dp=2x8 hpz=4 ep=2 zero=3": "pp=1 dp_outer=2 dp_node=2 dp_shard=2 dp_ep=2 cp=1 tp=1",
    "dp=8 hpz=2 ep=4 zero=3": "pp=1 dp_node=2 dp_ep=2 dp_shard=2 cp=1 tp=1",
}


@pytest.mark.parametrize("text, axes", FOLDS.items())
def test_experts_divide_the_ranks_of_the_other_axes(text: str, axes: str) -> None:
    plan = Plan.parse(text)
    mesh = plan.mesh()
    assert str(mesh) == axes
    assert mesh.size == plan.dp * plan.tp  # type: ignore[operator]
    assert (mesh.degree("ep"), mesh.degree("etp")) == (plan.ep, plan.etp)
    assert (mesh.degree("dp"), mesh.degree("tp")) == (plan.dp, plan.tp)
    assert not set(mesh.expand(["ep"])) & set(mesh.expand(["etp"]))
    shards = plan.shards or plan.dp
    assert mesh.degree("outer") == plan.dp // shards  # type: ignore[operator]
    assert mesh.degree("node") == (shards // plan.hpz if plan.hpz > 1 else 1)  # type: ignore[operator]


@pytest.mark.parametrize(
    "text, nearest",
    {
        "dp=6 ep=4": "dp=6 ep=3",
        "tp=2 etp=4": "tp=2 etp=2",
        "ep=8": "dp=1",
        "dp=4 tp=2 ep=3 etp=2": "dp=4 tp=2 ep=2 etp=2",
        "dp=4x6 ep=4 zero=1": "dp=4x6 ep=3 zero=1",
        "dp=8x3 tp=2 ep=4 zero=1": "dp=8x3 tp=2 ep=3 zero=1",
        "dp=4x6 hpz=3 ep=2 zero=3": "dp=4x6 zero=3 hpz=3",
    }.items(),
)
def test_degrees_of_experts_that_do_not_fit_are_refused(text: str, nearest: str) -> None:
    with pytest.raises(PlanError, match=re.escape(f"Nearest that works: '{nearest}'")):
        Plan.parse(text)
    assert str(Plan.parse(nearest)) == nearest


def test_dp_is_written_as_replicas_by_shards() -> None:
    plan = Plan.parse("dp=4x8 zero=3 tp=2")
    assert plan == Plan(dp=32, shards=8, zero=3, tp=2) == Plan.parse(str(plan)) == Plan.from_toml(plan.to_toml())
    assert str(plan) == "dp=4x8 tp=2 zero=3"
    assert str(plan.mesh()) == "pp=1 dp_outer=4 dp_shard=8 cp=1 tp=2"
    assert plan.mesh().degree("dp") == 32
    assert str(Plan.parse("dp=auto shards=2 zero=1").resolve(8)) == "dp=4x2 zero=1"
    assert str(Plan.parse("dp=1x8 zero=1").mesh()) == "pp=1 dp=8 cp=1 tp=1"  # one group that shares the state


def test_shards_divide_the_nearest_plan_of_another_world() -> None:
    with pytest.raises(PlanError, match="nearest plan for 12: 'dp=3x4 zero=1'"):
        Plan.parse("dp=2x8 zero=1").resolve(12)


@pytest.mark.usefixtures("all_axes")
def test_auto_fills_what_the_other_axes_leave() -> None:
    assert Plan.parse("dp=auto tp=2 pp=2").resolve(16) == Plan.parse("dp=4 tp=2 pp=2")


REFUSED_TEXT = [
    ("offload=optimiser:dsk", "'optimiser:dsk' is not state:tier", ),
    ("offload=optimizer:cpu,optimizer:disk", "optimizer is given twice. Nearest that works: 'offload=optimizer:disk'"),
    (
        "zero=3 offload=optimizer:device,params:cpu",
        "cannot stay on the device when masters or params leave it. Nearest that works: 'offload=params:cpu'",
    ),
    ("zeros=1", "unknown plan key 'zeros'; did you mean zero?"),
    ("micro_batches=1", "unknown plan key 'micro_batches'; did you mean microbatches?"),
    ("xyz=1", "unknown plan key 'xyz'; the keys are dp tp pp cp context cp_heads ep etp dispatch chunk dispatch_parts"),
    ("dp", "'dp' in the plan 'dp' is not key=value; write it as in 'dp=2 zero=1'"),
    ("dp=2 dp=4", "dp is given twice in the plan 'dp=2 dp=4'"),
    ("dp=0", "dp=0: dp is 1 and up, or `auto` (None in Python). Nearest that works: 'dp=1'"),
    ("dp=two", "dp='two': dp is a whole number, 1 and up, or `auto` (None in Python); write"),
    ("zero=auto", "zero=auto: zero is a whole number, 0 to 3; write 'zero=3'"),
    ("sequence_parallel=true", "sequence_parallel is a whole number, 0 to 1; write 'sequence_parallel=1'"),
    ("dp=2 DP=4", "dp is given twice in the plan 'dp=2 DP=4'"),
    ("zero=4", "zero=4: zero is 0 to 3. Nearest that works: 'zero=3'"),
    ("zero=-1", "zero=-1: zero is 0 to 3. Nearest that works: 'zero=0'"),
    ("tp_mode=2", "tp_mode=2: tp_mode is one of 1d 2d 2.5d 3d. Nearest that works: 'tp_mode=2d'"),
    ("tp=8 tp_mode=2d", "row col of tp_mode=2d needs a square number of ranks. Nearest that works: 'tp=9'"),
    ("tp=8 tp_mode=2.5d tp_depth=3", "ranks with tp_depth=3. Nearest that works: 'tp=12'"),
    ("tp=4 tp_mode=3d", "i j l of tp_mode=3d needs a cubic number of ranks. Nearest that works: 'tp=8'"),
    ("dp=6 shards=4 zero=1", "shards must divide dp. Nearest that works: 'dp=3x2 zero=1'"),
    ("dp=2x2 shards=2 zero=1", "shards is given twice in the plan 'dp=2x2 shards=2 zero=1'"),
    ("wire=in8", "qsgd:4, powersgd:4, topk:0.01 (or another number). Nearest that works: 'wire=int8'"),
    ("wire=topk:2", "Nearest that works: 'wire=topk:0.01'"),
    ("wire=int8:3", "Nearest that works: 'wire=int8'"),
    ("server=1 staleness=asynch", "is none of 2, 0, async (or another number). Nearest that works: 'staleness=async'"),
    ("server=1 staleness=1.5", "Nearest that works: 'staleness="),
    ("correction=dc", "is none of dc:0.04, none (or another number). Nearest that works: 'correction=dc:0.04'"),
    ("microbatches=0", "microbatches=0: microbatches is 1 and up. Nearest that works: 'microbatches=1'"),
]  # fmt: skip


@pytest.mark.parametrize("text, message", REFUSED_TEXT)
def test_a_wrong_word_is_refused_with_the_nearest_right_one(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan.parse(text)


def test_a_toml_value_of_another_type_is_refused() -> None:
    for value in (True, 1.0, "1", [1]):
        with pytest.raises(PlanError, match=re.escape(f"zero={value!r}: zero is a whole number")):
            Plan.from_toml({"zero": value})


MET_BY = {"tp_mode!=1d": "tp_mode=2d", "tp_mode!=2.5d": "tp_mode=2d", "zero!=3": "zero=2"}
MET_BY |= {"offload.params!=device": "offload=params:disk", "schedule!=1f1b": "schedule=zb-h1"}
MET_BY |= {"wire.codec=powersgd": "wire=powersgd:4", "gather!=exact": "gather=int8"}
MET_BY |= {"wire.codec!=none": "wire=int8", "precision=fp16": "precision=fp16"}
MET_BY |= {"sync!=step": "sync=local", "wire!=auto": "wire=bf16", "offload.optimizer!=device": "offload=optimizer:cpu"}
MET_BY |= {"offload.outer!=device": "offload=outer:cpu"}
MET_BY |= {"staleness!=0": "staleness=2", "correction!=none": "correction=dc:0.1"}
MET_BY |= {"context!=auto": "context=ring", "context!=usp": "context=ring", "ep>1": "ep=2 dp=2"}
MET_BY |= {"recompute!=none": "recompute=full", "offload.activations!=device": "offload=activations:cpu"}
MET_BY |= {"dispatch!=auto": "dispatch=all-gather", "prefetch!=1": "prefetch=2"}


def meeting(condition: str) -> str:
    """A value that meets a condition of the compatibility table."""
    key, sign, bound = re.split(r"(>=|!=|>|=)", condition)
    return MET_BY.get(condition) or f"{key}={bound if sign == '=' else int(bound) + (sign == '>')}"


@pytest.mark.parametrize("row", COMPATIBILITY, ids=lambda row: row.when)
def test_every_row_of_the_table_refuses_and_its_way_out_works(row: Refusal) -> None:
    with pytest.raises(PlanError, match=re.escape(f"{row.reason} ({row.when})")) as refusal:
        Plan.parse(" ".join(map(meeting, row.when.split())))
    nearest = re.search(r"Nearest that works: '(.*)'", str(refusal.value))
    assert nearest is not None
    assert str(Plan.parse(nearest[1])) == nearest[1]


def test_a_world_without_room_for_a_pipeline_is_named_plans_without_its_keys() -> None:
    with pytest.raises(PlanError, match="nearest plan for 1: 'microbatches=4'"):
        Plan.parse("pp=2 schedule=interleaved virtual_stages=2 microbatches=4").resolve(1)


def test_every_conflict_of_a_plan_is_named_at_once() -> None:
    with pytest.raises(
        PlanError, match=r"a pipeline has .* \(pp=1 schedule!=1f1b\); only cp .* \(cp=1 context!=auto\)"
    ):
        Plan(schedule="gpipe", context="ring")


REFUSED_WORLDS = [
    ("dp=3", 4, "needs 3 ranks, but the world has 4. Start that many, or use the nearest plan for 4: 'dp=4'"),
    ("dp=2 tp=3", 8, "needs 6 ranks, but the world has 8."),
    ("dp=2 tp=3", 8, "the nearest plan for 8: 'dp=2 tp=4' or 'dp=4 tp=2'"),
    ("dp=auto tp=3", 8, "needs a multiple of 3 ranks, but the world has 8."),
    ("dp=2 tp=2", 7, "the nearest plan for 7: 'tp=7' or 'dp=7'"),
]  # fmt: skip


@pytest.mark.usefixtures("all_axes")
@pytest.mark.parametrize("text, world, message", REFUSED_WORLDS)
def test_a_world_of_another_size_is_refused_with_the_nearest_plans(text: str, world: int, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan.parse(text).resolve(world)


def test_a_value_that_is_no_plan_is_refused() -> None:
    assert Plan.of("dp=2") == Plan.of(Plan(dp=2)) == Plan(dp=2)
    table: Any = {"dp": 2}
    with pytest.raises(PlanError, match=r"a line of text.*not of <class 'dict'>.*Plan\.from_toml\(table\)"):
        parallelize(nn.Linear(2, 2), table, loss=lambda output, _: (output.sum(), 1))


@pytest.mark.parametrize(
    "asked, on_gpus",
    [
        ("dp=auto compile=auto", "dp=2 compile=blocks"),
        ("dp=2 recompute=full compile=auto", "dp=2 recompute=full compile=blocks"),
        ("dp=2 recompute=selective compile=auto", "dp=2 recompute=selective"),
        ("dp=2 budget=1G compile=auto", "dp=2 budget=1G"),
        ("cp=2 compile=auto", "cp=2"),
        ("dp=2", "dp=2"),
    ],
)
def test_blocks_are_compiled_by_themselves_where_a_gpu_and_the_plan_allow_it(asked: str, on_gpus: str) -> None:
    plan = Plan.parse(asked)
    assert plan.resolve(2, compiles=True) == Plan.parse(on_gpus)
    assert plan.resolve(2, compiles=False).compile == "off"
    assert plan.resolve(2).compile == plan.compile


def test_a_world_has_at_least_one_rank() -> None:
    with pytest.raises(PlanError, match="at least one rank, not 0"):
        Plan(dp=None).resolve(0)


@given(degrees=st.tuples(*[st.integers(1, 4)] * len(AXES)), world=st.integers(1, 64))
def test_the_nearest_plans_fill_the_world(degrees: tuple[int, ...], world: int) -> None:
    assume(math.prod(degrees) != world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "COMPATIBILITY", ())
        asked = Plan.from_toml(dict(zip(AXES, degrees, strict=True)))
        with pytest.raises(PlanError) as refusal:
            asked.resolve(world)
        nearest = re.findall(r"'([^']*)'", str(refusal.value))[1:]
        assert nearest
        for text in nearest:
            assert Plan.parse(text).mesh().size == world


def test_the_page_about_plans_is_the_table() -> None:
    written = (DOCS / "plans.md").read_text(encoding="utf-8")
    assert written == plans_page(), "docs/plans.md differs from the code; run `make docs`"


@pytest.mark.parametrize(
    "text, works",
    [
        ("dp=2x2 sync=diloco", "dp=4 sync=diloco"),
        ("dp=4 zero=1 shards=2 sync=local", "dp=4 sync=local"),
        ("dp=2 zero=3 offload=params:cpu sync=local", "dp=2 sync=local"),
        ("dp=2x2 zero=1 server=1", "dp=4 server=1"),
        ("dp=2 zero=3 offload=params:cpu server=1", "dp=2 server=1"),
    ],
)
def test_rows_that_take_back_each_other_s_changes_do_not_meet(text: str, works: str) -> None:
    with pytest.raises(PlanError, match=f"Nearest that works: '{works}'"):
        Plan.parse(text)
