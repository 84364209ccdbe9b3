"""A rehearsal does what a run does: the same calls, the same refusals, on a world of any size."""

import itertools
import resource
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid, ranks_of
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.engine.parallelize import parallelize
from meshwise.pipeline.cut import model_cut as cut
from meshwise.pipeline.cut.probe import probe
from meshwise.pipeline.cut.probe_result import ProbeResult
from meshwise.pipeline.schedules.schedule_table import ActionKind
from meshwise.plan import Plan, PlanError
from meshwise.reference.gpt import GPT, GPTConfig
from meshwise.simulate import rehearsal
from meshwise.simulate.predicted_memory import needs
from meshwise.simulate.rehearsal import Rehearsal, RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import each_flops
from meshwise.simulate.step_tape import TapeOperation, TapeSegment
from meshwise.train.console_output import notes
from simulate.subjects import CONFIG, DEEP, gpt_subject, loss

PLANS = (
    "dp=2",
    "dp=2 zero=1",
    "dp=2 zero=2 microbatches=2",
    "dp=2 zero=2 microbatches=4 overlap_gather=1",
    "pp=2 dp=2 zero=1 microbatches=2 overlap_gather=1",
    "dp=2 zero=3 microbatches=4",
    "dp=2x2 zero=3 microbatches=2",
    "dp=2 wire=1bit",
    "dp=2 zero=2 wire=powersgd:2",
    "dp=4 zero=3 hpz=2 gather=int8 wire=int8 microbatches=4",
    "tp=2",
    "tp=4 tp_mode=2d",
    "pp=2 microbatches=4",
    "pp=2 dp=2 zero=3 microbatches=4 schedule=zb-h1 partition=params",
    "pp=2 microbatches=4 schedule=interleaved virtual_stages=2 partition=params",
    "dp=2 recompute=full",
    "dp=2 sync=slowmo",
    "dp=2 sync=diloco every=2",
    "dp=2 sync=easgd every=2",
    "dp=2 sync=gossip every=2",
    "dp=2 sync=diloco every=4",
)


def _small(stages: int) -> GPTConfig:
    return replace(CONFIG, layers=max(2, stages))


def _second_step(rehearsal: Rehearsal, index: int) -> list[TapeSegment]:
    """The second step of a training, with the agreement that follows it."""
    rounds = rehearsal.tapes[index].agreements
    number, length = itertools.accumulate(part.steps for part in rounds), sum(part.times for part in rounds) // 2
    due = [part for part, step in zip(rounds, number, strict=True) if step > length and (step - 2) % length == 0]
    return [*rehearsal.steps[index], *due]


def _calls(rehearsal: Rehearsal, index: int) -> list[tuple[str, tuple[str, ...], int]]:
    records = (call.record for segment in _second_step(rehearsal, index) for call in segment.calls())
    return [(record.kind, record.axes, record.bytes) for record in records if record.kind != "recv"]


def _called(world: World, plan: str, stages: int) -> list[tuple[str, tuple[str, ...], int]]:
    """The calls of the second step of a real run."""
    subject = gpt_subject(_small(stages), stages=stages)
    trainer = parallelize(subject.model, plan, loss=loss, world=world, options=subject.options)
    trainer.step(subject.batch)
    with world.record() as records:
        trainer.step(subject.batch)
    # A receive is posted ahead of its own action, during any other; what is received is what another rank sends.
    return [(record.kind, record.axes, record.bytes) for record in records if record.kind != "recv"]


def test_an_agreement_about_optimizer_state_is_rehearsed() -> None:
    rehearsal = rehearse(gpt_subject(_small(1), stages=1), plan="dp=2 sync=local", ranks=2)
    sizes = [size for kind, _, size in _calls(rehearsal, 0) if kind == "all_reduce"]
    parameters = sum(p.numel() for p in gpt_subject(_small(1), stages=1).model().parameters())
    assert sum(sizes) == 2 * 8 + 3 * 4 * parameters  # weight and learning rate; parameters and two moments


def test_a_model_is_looked_at_once_to_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[nn.Module] = []

    def watched(model: nn.Module, **rest: Any) -> ProbeResult:
        seen.append(model)
        return probe(model, **rest)

    monkeypatch.setattr(cut, "probe", watched)
    rehearse(gpt_subject(_small(2), stages=2), plan="pp=2 microbatches=2 partition=params", ranks=2)
    assert len(seen) == 1


AMONG_OTHERS = (
    "dp=2 zero=1",
    "dp=2 zero=2 microbatches=2",
    "dp=2 zero=3 microbatches=4",
    "pp=2 dp=2 zero=1 microbatches=2 overlap_gather=1",
    "pp=2 microbatches=4",
)
"""Plans whose calls are among those of plans with more keys."""


@pytest.mark.grid(Grid({"plan": PLANS}, heavy=lambda cell: cell["plan"] in AMONG_OTHERS))
def test_a_rehearsed_step_makes_the_calls_of_a_real_one(plan: str) -> None:
    size, parsed = Plan.parse(plan).mesh().size, Plan.parse(plan)
    stages = parsed.pp * (2 if "virtual" in plan else 1)
    real: list[Any] = run_threads(size, _called, args=(plan, stages))
    rehearsal = rehearse(gpt_subject(_small(stages), stages=stages), plan=plan, ranks=size)
    each = size // parsed.pp
    for index in range(parsed.pp):
        assert sorted(_calls(rehearsal, index)) == sorted(real[index * each])


def test_a_split_backward_of_a_model_with_dropout_is_rehearsed() -> None:
    subject = gpt_subject(replace(CONFIG, dropout=0.1), stages=2)
    rehearsal = rehearse(subject, plan="pp=2 microbatches=4 schedule=zb-h1", ranks=2)
    assert {"1I3", "1W3"} <= {str(segment.activity) for segment in rehearsal.steps[1]}


def test_micro_batches_that_were_not_run_are_like_one_that_was() -> None:
    for plan in ("dp=2 microbatches={}", "pp=2 microbatches={} partition=params"):
        stages = Plan.parse(plan.format(1)).pp
        many = rehearse(gpt_subject(rows=32, stages=stages), plan=plan.format(16), ranks=2)
        one = rehearse(gpt_subject(rows=2, stages=stages), plan=plan.format(1), ranks=2)
        assert [_flops(many, index) for index in range(stages)] == [16 * _flops(one, index) for index in range(stages)]


def _flops(rehearsal: Rehearsal, index: int) -> int:
    entries = [entry for segment in rehearsal.steps[index] for entry in segment.entries]
    return sum(entry.flops for entry in entries if isinstance(entry, TapeOperation))


FORMULA = (
    "dp=2",
    "tp=2",
    "tp=2 dp=2 microbatches=4",
    "pp=2 microbatches=4 partition=params",
    "pp=4 tp=2 microbatches=4 partition=params",
)


@pytest.mark.grid(Grid({"plan": FORMULA}, heavy=lambda cell: cell["plan"] in ("tp=2", FORMULA[-1])))
def test_flops_of_the_trace_are_those_of_the_published_formula(plan: str) -> None:
    # Narayanan et al., 2021, section 5.1, without recomputation, and counting the last layer's product once forward.
    size, parsed = Plan.parse(plan).mesh().size, Plan.parse(plan)
    rows, config = 16, DEEP if parsed.pp > 2 else CONFIG
    rehearsal = rehearse(gpt_subject(config, rows=rows, stages=parsed.pp), plan=plan, ranks=size)
    replicas = size // parsed.pp
    tokens, h, s = rows * config.context, config.width, config.context
    formula = tokens * (24 * config.layers * h**2 * (1 + s / (6 * h)) + 2 * h * config.vocabulary)
    assert sum(each_flops(rehearsal, kinds=(ActionKind.F,))) * replicas == formula
    whole = sum(_flops(rehearsal, index) for index in range(parsed.pp)) * replicas
    # torch counts five products for the backward of fused attention, which computes the scores once more.
    assert whole == 3 * formula + tokens * 2 * s * h * config.layers


GATHERS = {
    "tp=2": 0,
    "tp=2 sequence_parallel=1": 2,
    "tp=4 tp_mode=2d": 0,
    "tp=8 tp_mode=2.5d tp_depth=2": 0,
    "tp=8 tp_mode=3d": 4,
}
"""How many gathers a block's backward repeats under each scheme."""
SPLIT = ("zb-h1", "zb-h2", "zb-v virtual_stages=2", "dualpipev virtual_stages=2")


@pytest.mark.grid(
    Grid(
        {"words": tuple(GATHERS), "schedule": SPLIT},
        cost=lambda cell: ranks_of(cell["words"]) ** 2 * (3 if "virtual" in cell["schedule"] else 1),
        strength=1,
        # one of each pair of schedules that cut the model in the same way, and the schemes with most calls
        heavy=lambda cell: (
            cell["words"] in ("tp=2", "tp=8 tp_mode=2.5d tp_depth=2")
            or cell["schedule"] != (SPLIT[3] if "sequence_parallel" in cell["words"] else SPLIT[1])
        ),
    )
)
def test_a_backward_in_two_parts_does_nothing_twice(words: str, schedule: str) -> None:
    """But for gathering in each block, for its so many products that scatter, what they scattered."""
    plan = f"pp=2 {words} microbatches=4 partition=params"
    ranks, chunks = Plan.parse(plan).mesh().size, 4 if "virtual" in schedule else 2
    whole, parts = (
        rehearse(gpt_subject(_small(chunks), stages=stages), plan=f"{plan} schedule={order}", ranks=ranks)
        for stages, order in ((2, "naive"), (chunks, schedule))
    )
    assert sum(_flops(parts, index) for index in range(2)) == sum(_flops(whole, index) for index in range(2))
    labels = [str(segment.activity) for index in range(2) for segment in parts.steps[index]]
    split = [label for label in labels if "W" in label and not label.startswith("0")]  # the first stage has no I
    again = _moved(parts) - _moved(whole)
    assert not _moved(whole) - _moved(parts)
    assert {kind for kind, _ in again} <= {"all_gather"}
    assert sum(again.values()) == GATHERS[words] * len(split)


def _moved(rehearsal: Rehearsal) -> Counter[tuple[str, int]]:
    """How often collectives of each kind and size are called, but for messages, by the first rank of each stage."""
    calls = [call for index in range(2) for call in _calls(rehearsal, index)]
    return Counter((kind, size) for kind, _, size in calls if kind != "send")


def test_recomputation_is_one_more_forward_of_the_blocks_but_for_each_last_product() -> None:
    plain = rehearse(gpt_subject(), plan="dp=1", ranks=1)
    again = rehearse(gpt_subject(), plan="dp=1 recompute=full", ranks=1)
    tokens, h = 16 * CONFIG.context, CONFIG.width
    head, last = 2 * tokens * h * CONFIG.vocabulary, 2 * tokens * 4 * h * h * CONFIG.layers
    assert _flops(again, 0) - _flops(plain, 0) == sum(each_flops(plain, kinds=(ActionKind.F,))) - head - last


def test_what_a_job_refuses_its_rehearsal_refuses_with_the_same_words() -> None:
    wrong: list[tuple[str, int, RehearsalSubject]] = [
        ("dp=3", 4, gpt_subject()),
        ("pp=16 microbatches=16 partition=params", 16, gpt_subject()),
        ("pp=2 schedule=interleaved microbatches=3 virtual_stages=2", 2, gpt_subject()),
        ("tp=3 tp_mode=2d", 3, gpt_subject()),
        ("dp=1", 1, gpt_subject(clip_norm=-1.0)),
        ("dp=1", 1, gpt_subject(nonfinite="perhaps")),
        ("dp=1", 1, RehearsalSubject(lambda: GPT(CONFIG), loss, gpt_subject().batch, optimizer=torch.optim.LBFGS)),
        ("tp=2", 2, RehearsalSubject(lambda: torch.nn.LSTM(4, 4), loss, torch.zeros(2, 3, 4))),
    ]
    for plan, ranks, subject in wrong:
        assert _refusal(lambda: rehearse(subject, plan=plan, ranks=ranks)) == _refusal(  # noqa: B023
            lambda: run_threads(ranks, _parallelized, args=(subject, plan))  # noqa: B023
        )


GRID = (
    "dp=2 tp=2",
    "dp=4 zero=3 recompute=full",
    "dp=4 zero=2 offload=optimizer:disk",
    "tp=4 tp_mode=2d",
    "tp=4 tp_mode=2d sequence_parallel=1",
    "tp=4 sequence_parallel=1 recompute=selective",
    "tp=4 tp_mode=2.5d",
    "tp=4 tp_mode=3d",
    "pp=2 dp=2 microbatches=4 zero=3 schedule=interleaved virtual_stages=2 partition=params",
    "pp=4 microbatches=2 schedule=interleaved virtual_stages=2 partition=params",
    "pp=4 microbatches=8 schedule=zb-h1 recompute=full partition=params",
    "pp=2 tp=2 microbatches=2 schedule=gpipe zero=1 partition=params",
    "dp=2 pp=2",
    "tp=2",
    "dp=8",
)
TAKEN = (
    "dp=2 tp=2",
    "dp=2 pp=2",
    "pp=2 dp=2 microbatches=4 zero=3 schedule=interleaved virtual_stages=2 partition=params",
    "tp=4 tp_mode=2d",
    "pp=4 microbatches=8 schedule=zb-h1 recompute=full partition=params",
    "pp=2 tp=2 microbatches=2 schedule=gpipe zero=1 partition=params",
)


# Of the plans that are taken, the part has those which make no calls in the test of calls.
@pytest.mark.grid(Grid({"plan": GRID}, heavy=lambda cell: cell["plan"] in TAKEN))
def test_a_rehearsal_takes_what_a_job_takes(plan: str) -> None:
    subject = gpt_subject(DEEP if "virtual" in plan else CONFIG)
    assert _outcome(lambda: rehearse(subject, plan=plan, ranks=4)) == _outcome(
        lambda: run_threads(4, _parallelized, args=(subject, plan))
    )


def _outcome(run: Any) -> str:
    try:
        run()
    except (PlanError, ValueError) as error:
        return str(error).partition("\n")[0]
    return "taken"


def _parallelized(world: World, subject: RehearsalSubject, plan: str) -> None:
    parallelize(
        subject.model,
        plan,
        loss=subject.loss,
        optimizer=subject.optimizer,
        world=world,
        options=subject.options,
        **subject.arguments,
    ).close()


def _refusal(run: Any) -> tuple[type, str]:
    with pytest.raises((PlanError, ValueError)) as caught:
        run()
    return type(caught.value), str(caught.value).partition("\n")[0]


def test_a_module_is_left_as_it_is() -> None:
    model = GPT(CONFIG)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = gpt_subject().batch
    rehearse(RehearsalSubject(model, loss, batch), plan="dp=4 zero=3", ranks=4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_rank_of_65536_is_rehearsed_without_its_memory() -> None:
    config = GPTConfig(vocabulary=51_200, context=2048, layers=4, heads=160, width=25_600)
    tokens = torch.empty(8192, 2048, dtype=torch.long, device="meta")
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rehearsal = rehearse(
        RehearsalSubject(lambda: GPT(config), loss, (tokens, tokens)), plan="dp=8192 tp=8", ranks=65_536, device="cuda"
    )
    assert sum(each_flops(rehearsal, kinds=(ActionKind.F,))) > 1e13
    assert time.process_time() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


def test_attention_is_the_fused_kernel_of_the_target_device() -> None:
    for device, name in (
        ("cpu", "_scaled_dot_product_flash_attention_for_cpu"),
        ("cuda", "_scaled_dot_product_efficient_attention"),
    ):
        rehearsal = rehearse(gpt_subject(), plan="dp=1", ranks=1, device=device)  # type: ignore[arg-type]
        entries = (entry for part in rehearsal.steps[0] for entry in part.entries)
        names = {entry.name for entry in entries if isinstance(entry, TapeOperation)}
        assert name in names
        assert "_fused_adamw_" in names


def _names(config: GPTConfig, plan: str) -> Counter[str]:
    rehearsal = rehearse(gpt_subject(config), plan=plan, ranks=1, device="cuda")
    return Counter(
        entry.name for part in rehearsal.steps[0] for entry in part.entries if isinstance(entry, TapeOperation)
    )


KERNELS = {"bf16": "flash", "fp32": "efficient"}
DRAWN = ("dp=1 random=local", "dp=1 random=local recompute=full", "dp=1 random=global")


@pytest.mark.grid(Grid({"plan": DRAWN, "precision": tuple(KERNELS)}, strength=1))
def test_attention_that_drops_is_fused_where_torch_draws(plan: str, precision: str) -> None:
    kernel = KERNELS[precision]
    names = _names(replace(CONFIG, dropout=0.1), f"{plan} precision={precision}")
    passes = CONFIG.layers * (2 if "recompute" in plan else 1)
    local = "local" in plan
    assert names[f"_scaled_dot_product_{kernel}_attention"] == local * passes
    assert names[f"_scaled_dot_product_{kernel}_attention_backward"] == local * CONFIG.layers
    assert (names["bmm"] == 0) == local


@pytest.mark.grid(Grid({"precision": tuple(KERNELS)}, heavy=lambda cell: cell["precision"] == "fp32"))
def test_large_attention_that_drops_under_global_masks_runs_two_fused_kernels(precision: str) -> None:
    """As on a GPU, where FlexAttention runs twice. Under selective recomputation it does not run there."""
    kernel, config = KERNELS[precision], replace(CONFIG, layers=1, dropout=0.1, context=1024, width=128)
    plan = f"dp=1 random=global precision={precision}"
    names = _names(config, plan)
    assert names[f"_scaled_dot_product_{kernel}_attention"] == 2 * config.layers
    assert names["bmm"] == names["where"] == 0
    assert names["clone"] >= 2 * (2 * config.layers + 1)  # dropout each way: of two tensors of a block, and one before
    plain = _names(config, f"{plan} recompute=selective")
    assert plain[f"_scaled_dot_product_{kernel}_attention"] == 0
    assert plain["bmm"] > 0


@pytest.mark.parametrize("plan", ["dp=1 precision=bf16", "dp=1 precision=bf16 recompute=selective"])
def test_shared_keys_are_not_copied_on_a_gpu(plan: str) -> None:
    assert _names(replace(CONFIG, kv_heads=1), plan) == _names(CONFIG, plan)


class _Placeless(nn.Module):
    """Makes tensors on no device in particular, as models for CPUs do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.ones(4)
        for block in self.blocks:
            x = block(x) + torch.arange(4)
        return x


@pytest.mark.parametrize("plan", ["dp=2 zero=3", "dp=2 recompute=selective", "pp=2 microbatches=2"])
def test_a_model_and_a_loss_that_name_no_device_are_rehearsed(plan: str) -> None:
    subject = RehearsalSubject(_Placeless, lambda y, x: ((y - torch.zeros(4)).sum(), len(x)), torch.ones(8, 4))
    assert rehearse(subject, plan=plan, ranks=2).steps[0]


class _Looks(_Placeless):
    """Reads a value of its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if bool((x > 0).all()) else -x)


@pytest.mark.parametrize("plan", ["dp=2", "pp=2 microbatches=2"])
def test_a_model_that_reads_values_gets_an_explained_error(plan: str) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)meta tensors.*a rehearsal's tensors have no values"):
        rehearse(RehearsalSubject(_Looks, loss, torch.ones(8, 4)), plan=plan, ranks=2)


class _Counts(_Placeless):
    """Has numpy look at its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * len(x.numpy()))


@pytest.mark.parametrize("model", [_Looks, _Counts])
def test_a_command_explains_missing_values_in_one_line(model: type[nn.Module]) -> None:
    with pytest.raises(RuntimeError) as caught:
        rehearse(RehearsalSubject(model, loss, torch.ones(8, 4)), plan="dp=2", ranks=2)
    assert [note for note in notes(caught.value) if "have no values" in note]


@pytest.mark.parametrize(
    "says, noted", [("a meta tensor", True), ("The register_meta function", True), ("no metadata", False)]
)
def test_other_errors_of_a_model_have_no_such_note(says: str, noted: bool) -> None:
    class Raises(_Placeless):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(f"{says} of {x.shape}")

    with pytest.raises(RuntimeError) as caught:
        rehearse(RehearsalSubject(Raises, loss, torch.ones(8, 4)), plan="dp=2", ranks=2)
    assert any("have no values" in note for note in getattr(caught.value, "__notes__", ())) == noted


@pytest.mark.parametrize("model", [_Looks, _Counts])
def test_the_memory_of_a_model_that_reads_values_is_not_predicted(model: type[nn.Module]) -> None:
    answer = needs(model, "dp=2", loss=loss, batch=torch.ones(8, 4))
    assert "cannot be predicted without values: " in str(answer)

    class Misfit(_Placeless):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, :3])

    with pytest.raises(RuntimeError, match="dimension of length 4"):
        needs(Misfit, "dp=2", loss=loss, batch=torch.ones(8, 4))


def test_a_model_that_changes_its_batch_in_place_is_rehearsed_in_stages() -> None:
    class Changes(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.mul_(2))

    build = lambda: Changes(*(nn.Linear(4, 4) for _ in range(4)))  # noqa: E731
    squares = lambda y, x: (y.square().sum(), len(x))  # noqa: E731
    rehearsal = rehearse(RehearsalSubject(build, squares, torch.ones(8, 4)), plan="pp=2 microbatches=2", ranks=2)
    assert rehearsal.steps[0]


@pytest.mark.grid(Grid({"schedule": ("zb-v", "dualpipev")}, heavy=lambda cell: cell["schedule"] == "dualpipev"))
def test_a_rank_of_a_v_schedule_that_stands_for_others_does_their_work(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = f"pp=4 microbatches=8 virtual_stages=2 schedule={schedule}"
    subject = gpt_subject(_small(8), stages=8)
    few = rehearse(subject, plan=plan, ranks=4)
    assert [tape.index for tape in few.tapes] == [0, 1, 1, 3]
    monkeypatch.setattr(rehearsal, "rehearsed_ranks", lambda *_, **__: (0, 1, 2, 3))
    every = rehearse(subject, plan=plan, ranks=4)
    for index in range(4):
        assert [str(part.activity) for part in few.steps[index]] == [str(part.activity) for part in every.steps[index]]
        assert _flops(few, index) == _flops(every, index)
        assert _calls(few, index) == _calls(every, index)
