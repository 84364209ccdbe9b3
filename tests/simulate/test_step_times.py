"""A rehearsal, played on a cluster."""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import torch
from torch import Tensor, nn

from meshwise.comm.api.flight_recorder import CallRecord, bus_factor
from meshwise.engine.parallelize import Options
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.reference.gpt import GPT
from meshwise.simulate.cluster import (
    Cluster,
    ClusterError,
    Device,
    Link,
    MatmulEfficiency,
    NodeHost,
    load,
    parse_cluster,
)
from meshwise.simulate.cost_model import CostModel
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import predict
from meshwise.simulate.step_tape import TapeCall, TapeOperation, TapeSegment, count_operation
from simulate.subjects import CONFIG, DEEP, gpt_subject, mixture_subject

STEADY = Cluster(
    device=Device(
        kind="cpu", peak={"float32": 1e9}, products=MatmulEfficiency(best=1.0), attention=MatmulEfficiency(best=1.0)
    ),
    inside=Link(bandwidth=((1.0, 1e30),)),
)
"""Where only matrix products take time."""


def _flops(segments: Iterable[TapeSegment]) -> int:
    entries = [entry for segment in segments for entry in segment.entries]
    return sum(entry.flops for entry in entries if isinstance(entry, TapeOperation))


def test_a_step_takes_its_flops_over_the_peak() -> None:
    prediction = predict(rehearse(gpt_subject(), plan="dp=1", ranks=1), cluster=STEADY)
    assert prediction.seconds == pytest.approx(_flops(prediction.rehearsal.steps[0]) / 1e9)
    assert prediction.model_flops / (prediction.seconds * 1e9) == pytest.approx(prediction.utilisation)


class Adapted(nn.Module):
    """A frozen matrix, and a narrow pair during it that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(requires_grad=False)
        self.pair = nn.Sequential(nn.Linear(64, 2), nn.Linear(2, 64))

    def forward(self, x: Tensor) -> Tensor:
        sum_of_both: Tensor = self.frozen(x) + self.pair(x)
        return sum_of_both


@pytest.mark.parametrize("plan", ["dp=1", "dp=1 recompute=full", "dp=1 recompute=selective", "dp=1 microbatches=4"])
def test_frozen_weights_have_no_gradient_that_counts(plan: str) -> None:
    """Three times the forward would be used to 142 % of the peak here."""
    x = torch.zeros(8, 64)
    subject = RehearsalSubject(
        lambda: nn.Sequential(*(Adapted() for _ in range(3))),
        lambda output, batch: (output.sum(), len(batch)),
        x,
        options=Options(recomputed=("0", "1", "2")),
    )
    prediction = predict(rehearse(subject, plan=plan, ranks=1), cluster=STEADY)
    frozen, learns = 2 * 8 * 64 * 64, 2 * 8 * 64 * 4
    # no gradient of the input reaches before the first block
    assert prediction.model_flops == 3 * frozen + 2 * frozen + 3 * 3 * learns - learns // 2
    assert prediction.utilisation <= 1 + 1e-9
    assert (_flops(prediction.rehearsal.steps[0]) > prediction.model_flops) == ("recompute=full" in plan)


class Force(nn.Module):
    """Differentiates within its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.down(self.up(x).tanh()).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def test_a_gradient_within_a_forward_is_of_the_forward() -> None:
    subject = RehearsalSubject(Force, lambda output, batch: (output.sum(), len(batch)), torch.zeros(8, 64))
    prediction = predict(rehearse(subject, plan="dp=1", ranks=1), cluster=STEADY)
    assert prediction.model_flops == 3 * 4 * (2 * 8 * 64 * 64)


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_the_bubble_of_even_stages_is_that_of_the_schedule(microbatches: int) -> None:
    width = 64
    block = lambda: nn.Sequential(nn.Linear(width, width), nn.GELU())  # noqa: E731
    subject = RehearsalSubject(
        lambda: nn.Sequential(block(), block()),
        lambda output, batch: (output.sum(), len(batch)),
        torch.zeros(16, width),
        options=Options(cut=CutOptions(at=("1",))),
    )
    prediction = predict(rehearse(subject, plan=f"pp=2 microbatches={microbatches}", ranks=2), cluster=STEADY)
    first, second = (_flops(prediction.rehearsal.steps[index]) for index in range(2))
    # The first stage has no gradient of its input to compute: F=1, B=1 there, F=1, B=2 on the second.
    assert first / second == pytest.approx(2 / 3)
    # Its last backward takes a whole unit less of the first one's time: it sends before it computes for its weights.
    unit = (first + second) / 1e9 / (5 * microbatches)
    assert prediction.seconds == pytest.approx(unit * (3 * microbatches + 1))


def test_a_long_ring_takes_a_hop_for_each_rank_and_a_tree_does_not() -> None:
    cost_model = CostModel(parse_cluster("512x8 h100"))

    def seconds(kind: str, ranks: range) -> float:
        return cost_model.collective(TapeCall(CallRecord(0, kind, ("dp",), (), "", 4096 * 8, ""), tuple(ranks)))

    hops = 511 * 4e-6 + (4096 - 512) * 1.9e-6
    assert seconds("all_gather", range(4096)) == pytest.approx(hops, rel=1e-2)
    assert seconds("reduce_scatter", range(0, 4096, 8)) == pytest.approx(511 * 4e-6, rel=1e-2)  # one of each node
    assert seconds("all_reduce", range(4096)) < 0.1 * hops
    assert seconds("all_gather", range(8)) < 8 * 8e-6
    assert seconds("all_gather", range(16)) > 4 * 15e-6, "what a call takes at least"


def test_slower_links_cost_time_where_nothing_is_computed_meanwhile() -> None:
    rehearsal = rehearse(gpt_subject(), plan="tp=2", ranks=2)
    slow = dataclasses.replace(STEADY, inside=Link(bandwidth=((1.0, 1e6),)))
    fast, late = predict(rehearsal, cluster=STEADY), predict(rehearsal, cluster=slow)
    assert late.seconds == pytest.approx(fast.seconds + late.exposed["tp"], rel=1e-6)


@pytest.mark.parametrize("bandwidth", [1e4, 1e6, 1e30])
def test_a_forward_hides_the_gather_of_parameters_that_it_waits_for(bandwidth: float) -> None:
    cluster = dataclasses.replace(STEADY, inside=Link(bandwidth=((1.0, bandwidth),)))
    plans = ("dp=2 zero=1 microbatches=2", "dp=2 zero=1 microbatches=2 overlap_gather=1")
    early, late = (predict(rehearse(gpt_subject(), plan=plan, ranks=2), cluster=cluster) for plan in plans)
    assert late.traffic == early.traffic
    [forward] = (_flops([part]) / 1e9 for part in late.rehearsal.steps[0] if str(part.activity) == "0F0")
    saved = early.seconds - late.seconds
    if bandwidth == 1e30:
        assert saved == pytest.approx(0, abs=1e-12)
    else:  # the forward of all units but the last one, which waits to the end of the gather
        assert forward / 2 < saved < forward


def test_a_pipeline_with_late_parameters_is_timed_as_without() -> None:
    cluster = dataclasses.replace(STEADY, inside=Link(bandwidth=((1.0, 1e6),)))
    plan = "dp=2 pp=2 zero=1 microbatches=2 partition=params"
    plans = (plan, f"{plan} overlap_gather=1")
    early, late = (predict(rehearse(gpt_subject(stages=2), plan=one, ranks=4), cluster=cluster) for one in plans)
    assert late.seconds == early.seconds


def test_a_loss_looks_up_its_targets() -> None:
    """What it reads of the scores are as many as there are targets, and their gradient is zero elsewhere."""
    scores, targets = torch.empty(8, 1000, device="meta"), torch.empty(8, dtype=torch.long, device="meta")
    forward, backward = torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss_backward.default
    given = (scores, targets, None, 2, -100)
    total, weight = forward(*given)
    assert count_operation(forward, args=given, kwargs={}, output=(total, weight)).bytes < 100
    given_back = (total, *given, weight)
    assert count_operation(backward, args=given_back, kwargs={}, output=backward(*given_back)).bytes == scores.nbytes


@pytest.mark.parametrize(
    "offload, during, after", [("optimizer:cpu", 4, 4), ("optimizer:disk", 4, 16), ("params:cpu", 12, 0)]
)
def test_offloaded_state_takes_time(offload: str, during: int, after: int) -> None:
    model = lambda: nn.Linear(64, 64, bias=False)  # noqa: E731
    subject = RehearsalSubject(model, lambda output, batch: (output.sum(), len(batch)), torch.zeros(4, 64))
    rehearsal = rehearse(subject, plan=f"dp=1 zero=3 offload={offload}", ranks=1, device="cuda")
    slow = dataclasses.replace(STEADY, ranks_per_node=1, host=NodeHost(link=1.0, disk=1.0))
    late = predict(rehearsal, cluster=slow)
    # Bytes of each parameter: its gradient out during the micro-batch (itself twice in); then itself or its states.
    assert late.seconds == 64 * 64 * (during + after)
    assert late.exposed["host"] == pytest.approx(late.seconds - predict(rehearsal, cluster=STEADY).seconds)


def test_a_ring_in_one_node_uses_its_link_and_one_through_several_their_adapters() -> None:
    cluster = Cluster(
        ranks_per_node=4,
        nodes=2,
        adapters=2,
        inside=Link(bandwidth=((1.0, 100.0),)),
        between=Link(bandwidth=((1.0, 10.0),)),
    )
    cost_model = CostModel(cluster)
    assert cost_model._rate("all_reduce", 8, (0, 1, 2, 3)) == 100
    assert cost_model._rate("all_reduce", 8, (0, 4)) == 5  # two ranks share an adapter
    assert cost_model._rate("all_reduce", 8, tuple(range(8))) == 20  # the ring has both adapters of each node
    quicker = CostModel(dataclasses.replace(cluster, adapters=4, between=Link(bandwidth=((2.0, 5.0), (8.0, 10.0)))))
    assert quicker._rate("all_reduce", 8, (0, 4)) == 10
    assert quicker._rate("all_reduce", 8, tuple(range(8))) == 4 * 5  # each adapter carries a quarter, more slowly
    assert bus_factor("all_reduce", ranks=4) == 1.5


def test_of_an_all_to_all_every_rank_sends_between_nodes_what_goes_to_other_nodes() -> None:
    """Each of n ranks sends (n-h)/n of its tensor to other nodes, where h of them share a node, by its own adapter."""

    def seconds(kind: str, *ranks: int, **changed: Any) -> float:
        cost_model = CostModel(dataclasses.replace(cluster, **changed))
        return cost_model.collective(TapeCall(CallRecord(0, kind, ("dp",), (), "", 80, ""), ranks))

    cluster = Cluster(
        ranks_per_node=4,
        nodes=4,
        adapters=4,
        inside=Link(bandwidth=((1.0, 100.0),)),
        between=Link(bandwidth=((1.0, 10.0),)),
    )
    assert seconds("all_to_all", *range(4)) == 80 * 3 / 4 / 100
    assert seconds("all_to_all", *range(8)) == pytest.approx(80 * 4 / 8 / 10)
    assert seconds("all_to_all", *range(16)) == pytest.approx(80 * 12 / 16 / 10)
    assert seconds("all_to_all", 0, 4, 8, 12) == pytest.approx(80 * 3 / 4 / 10)
    assert seconds("all_to_all", *range(8), adapters=2) == pytest.approx(80 * 4 / 8 / 5)  # two ranks share an adapter
    slow = Link(bandwidth=((1.0, 2.0),))
    assert seconds("all_to_all", *range(8), inside=slow) == pytest.approx(80 * 3 / 8 / 2)  # to the ranks of its node
    assert seconds("all_gather", *range(8)) == pytest.approx(80 * 7 / 8 / 40)  # a ring shares the adapters
    h100 = CostModel(parse_cluster("2x8 h100"))
    call = TapeCall(CallRecord(0, "all_to_all", ("dp",), (), "", 256 * 2**20, ""), tuple(range(16)))
    assert h100.collective(call) > 2**27 / 50e9  # half of it by an adapter of 400 Gbit/s


@pytest.mark.parametrize("nodes, between", [(1, 0), (2, 2), (4, 3)])
def test_bytes_of_an_all_to_all_on_each_link(nodes: int, between: int) -> None:
    """Of its tokens a rank of four sends a quarter to each rank, forward and backward, there and back."""
    made = rehearse(mixture_subject(), plan="dp=4 ep=4", ranks=4)
    calls = [call for part in made.steps[0] for call in part.calls() if call.record.kind == "all_to_all"]
    sent = {
        text: predict(made, cluster=parse_cluster(text)).traffic for text in ("1x4 h100", f"{nodes}x{4 // nodes} h100")
    }
    assert sent["1x4 h100"]["between"] == 0
    exchanged = sum(call.record.bytes for call in calls)
    others = sum(sent["1x4 h100"].values()) - exchanged * 3 / 4  # rings
    leaving = {1: 0.0, 2: 1 / 2, 4: 1.0}[nodes]
    assert exchanged > 0
    found = sent[f"{nodes}x{4 // nodes} h100"]
    assert found["between"] == pytest.approx(exchanged * between / 4 + others * leaving)
    assert sum(found.values()) == pytest.approx(exchanged * 3 / 4 + others)


def test_what_is_sent_between_nodes_is_that_of_the_rank_that_sends_most_there() -> None:
    """The first stage has the embedding to reduce, within its node; the second has activations to send to the other."""
    wide = dataclasses.replace(DEEP, vocabulary=1024)
    made = rehearse(gpt_subject(wide, rows=16, stages=4), plan="pp=4 dp=2 microbatches=2", ranks=8)
    sent = predict(made, cluster=parse_cluster("2x4 h100")).traffic
    activations = 8 * CONFIG.context * CONFIG.width * 4
    assert activations <= sent["between"] < 1.1 * activations
    assert sent["inside"] > sent["between"]


def test_a_dtype_that_a_device_has_no_units_for_is_computed_wider() -> None:
    peak = {"float16": 8.0, "float32": 1.0}
    asked = ("float16", "bfloat16", "float8_e4m3fn", "float64", "complex64")
    assert [Device(peak=peak).peak_of(dtype) for dtype in asked] == [8, 1, 8, 1, 1]
    made = rehearse(gpt_subject(), plan="dp=4 precision=bf16", ranks=4)
    old, wider = (
        predict(made, cluster=dataclasses.replace(STEADY, device=Device(kind="cpu", peak=peaks)))
        for peaks in ({"float16": 8e9, "float32": 1e9}, {"bfloat16": 1e9})
    )
    assert (old.seconds, old.utilisation) == (wider.seconds, wider.utilisation)


def test_each_rank_of_a_ring_over_nodes_sends_its_part_between_them() -> None:
    """As it is priced: all adapters of a node share what the ring carries, which is 2 · 7/8 of all gradients."""
    made = rehearse(gpt_subject(), plan="dp=8", ranks=8)
    gradients = sum(parameter.numel() * 4 for parameter in GPT(CONFIG).parameters())
    found = {text: predict(made, cluster=parse_cluster(text)).traffic for text in ("1x8 h100", "2x4 h100", "8x1 h100")}
    each = 2 * 7 / 8 * gradients
    whole = pytest.approx(each, rel=1e-2)  # with what pads buckets
    assert found["1x8 h100"] == {"inside": whole, "between": 0}
    assert found["2x4 h100"] == {
        "inside": pytest.approx(each * 3 / 4, rel=1e-2),
        "between": pytest.approx(each / 4, rel=1e-2),
    }
    assert found["8x1 h100"] == {"inside": 0, "between": whole}


@pytest.mark.parametrize("name", ["v100", "a100-40", "a100-80", "h100", "h200", "b200", "h100-sites", "cpu4"])
def test_a_shipped_cluster_is_read_and_written_back(name: str, tmp_path: Path) -> None:
    cluster = load(name)
    path = tmp_path / "cluster.toml"
    path.write_text(tomlkit.dumps(dataclasses.asdict(cluster)))
    assert load(path) == cluster
    assert parse_cluster(f"64x8 {name}").ranks == 512
    assert parse_cluster(f"64 × 8 {name.upper()}") == parse_cluster(f"64x8 {name}")


@pytest.mark.parametrize(
    "section, wrong, says",
    [
        ("", "nodes = 0", "nodes = 0 has to be above 0"),
        ("", "ranks_per_node = -8", "ranks_per_node = -8 has to be above 0"),
        ("", "adapters = true", "adapters = True has to be of type int"),
        ("", "nodes = [[1, 2]]", "nodes = .* has to be of type int"),
        ("", "device = 3", "device = 3 has to be a table"),
        ("device", 'kind = "tpu"', "kind = 'tpu' has to be 'cuda' or 'cpu'"),
        ("device", 'memory = "80G"', "memory = '80G' has to be of type float"),
        ("device", "memory = -1", "memory = -1 has to be above 0"),
        ("device", "memory = 0", "memory = 0 has to be above 0"),
        ("device", "launch = nan", "launch = nan has to be at least 0"),
        ("device", "bandwidth = 1e12", "bandwidth has to be a list of"),
        ("device", 'bandwidth = [["1", 2]]', "bandwidth has to be a list of"),
        ("device", "bandwidth = [[1, 2], [1, 3]]", "sizes have to ascend"),
        ("device", "bandwidth = [[1, inf]]", "above 0 and finite"),
        ("device.peak", "bfloat16 = 0", "peak.bfloat16 = 0 has to be above 0"),
        ("device.products", "best = 1.1", "products: best = 1.1 has to be at most 1"),
        ("device", "fused = 7", "fused = 7.0 has to be at most 1"),
        ("device.products", "best = 0", "products: best = 0 has to be above 0"),
        ("device.peak", "bf16 = 1e12", "peak: unknown key bf16; did you mean bfloat16"),
        ("inside.collectives", "allgather = [[1, 2]]", "unknown key allgather; did you mean all_gather"),
        ("inside.collectives", "all_gather = 3", "collectives.all_gather has to be a list of"),
        ("host", "link = nan", "link = nan has to be above 0"),
        ("device", "launch = 1e-6", "device: peak is missing"),
    ],
)
def test_a_cluster_without_usable_constants_is_refused(section: str, wrong: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(f"[{section}]\n{wrong}\n" if section else f"{wrong}\n")
    with pytest.raises(ClusterError, match=says):
        load(path)


def test_memory_and_rates_may_have_no_limit(tmp_path: Path) -> None:
    path = tmp_path / "unlimited.toml"
    path.write_text("[device]\nmemory = inf\npeak = {float32 = 1e12}\nrates = {gelu = inf}\n[host]\nlink = inf\n")
    found = load(path)
    assert (found.device.memory, found.device.rates, found.host.link) == (math.inf, {"gelu": math.inf}, math.inf)


def test_a_file_without_counts_before_it_has_its_own_nodes_and_ranks(tmp_path: Path) -> None:
    path = tmp_path / "my cluster.toml"
    path.write_text("nodes = 4\nranks_per_node = 2\n[device.peak]\nfloat32 = 1e12\n")
    assert (parse_cluster(str(path)).nodes, parse_cluster(str(path)).ranks) == (4, 8)
    assert (parse_cluster(f"2 {path}").nodes, parse_cluster(f"3x8 {path}").nodes) == (1, 3)
    path.write_text(f"nodes = {10**9}\n[device.peak]\nfloat32 = 1e12\n")
    with pytest.raises(ClusterError, match="has more ranks than"):
        parse_cluster(str(path))


def test_an_unknown_cluster_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[device]\nlauch = 1e-6\n")
    with pytest.raises(ClusterError, match="unknown key lauch; did you mean launch"):
        load(path)
    with pytest.raises(ClusterError, match="did you mean h100"):
        parse_cluster("64x8 H10")
    with pytest.raises(ClusterError, match="no ranks"):
        parse_cluster("00x8 h100")
    with pytest.raises(ClusterError, match="no ranks"):
        parse_cluster("0 h100")
    with pytest.raises(ClusterError, match="'64x8' names no device; write nodes x ranks and a name"):
        parse_cluster("64x8")
    for text in ("h100 64x8", "8 a " + "b" * 5000):
        with pytest.raises(ClusterError, match="write nodes x ranks and a name, as in '64x8 h100'"):
            parse_cluster(text)
