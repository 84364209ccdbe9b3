"""Test `overlap_microbatches=1`: the bits of the same plan without it, and the numbers of one process."""

import contextlib
import functools
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grid import Grid
from last_outcome import alone, outcome
from meshwise.comm.api.flight_recorder import FlightRecorder
from meshwise.comm.api.side_by_side import SideBySide
from meshwise.comm.api.streams import streams_of
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.pipeline.schedules.schedule_table import Action
from meshwise.plan import Plan, PlanError
from meshwise.reference import MixtureConfig, MixtureGPT, next_token_loss
from meshwise.testing import agree, run
from warm_processes import Processes

KEY = "overlap_microbatches=1"


def build(**changed: Any) -> nn.Module:
    sizes = {"vocabulary": 16, "context": 4, "layers": 3, "heads": 2, "width": 8, "mlp_ratio": 2, "experts": 4}
    return MixtureGPT(MixtureConfig(**{**sizes, "tied": False, "dropout": 0.2, **changed})).double()


@functools.cache
def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(16, (rows, 5), generator=generator) for rows in (13, 2, 7)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def training(**options: Any) -> Mapping[str, Any]:
    return {"loss": next_token_loss, "options": Options(clip_norm=0.5, **options), "lr": 1e-2, "weight_decay": 0.1}


@functools.cache
def expected() -> Any:
    return alone(build, batches=batches(), **training())


def steps(plan: str, **options: Any) -> list[Any]:
    def main(world: World) -> Any:
        trainer = parallelize(build, plan, world=world, **training(**options))
        found = outcome(trainer, batches=batches())
        trainer.close()
        return found

    return run(Plan.parse(plan).mesh().size, main)


PLANS = (
    "microbatches=3",
    "dp=2 microbatches=3",
    "dp=2 ep=2 microbatches=2",
    "dp=2 ep=2 microbatches=4 zero=1",
    "dp=2 ep=2 microbatches=4 zero=2 dispatch_parts=2",
    "dp=2 ep=2 microbatches=3 zero=2 dispatch=all-gather",
    "dp=4 ep=2 microbatches=3 zero=1 bucket=25M",
    "dp=2 ep=2 microbatches=3 replicate=1",
    "tp=2 microbatches=3",
    "tp=2 etp=2 microbatches=3 sequence_parallel=1",
    "dp=2 tp=2 ep=4 microbatches=2 zero=1",
    "cp=2 ep=2 microbatches=3 context=ulysses",
    "cp=2 ep=2 microbatches=2 context=ring zero=1",
    "dp=2 ep=2 microbatches=3 offload=optimizer:cpu",
)
MORE = ("dp=2 ep=2 microbatches=4 zero=1", "tp=2 microbatches=3", "dp=2 tp=2 ep=4 microbatches=2 zero=1", PLANS[11])
"""Plans whose keys the others have too."""


@pytest.mark.grid(Grid({"plan": PLANS}, heavy=lambda cell: cell["plan"] in MORE))
def test_overlapped_micro_batches_are_one_process(plan: str) -> None:
    for found in steps(f"{plan} {KEY}"):
        agree(found, expected(), bound=1e-9)


def trained(world: World, plan: str, changed: Mapping[str, Any]) -> tuple[list[float], list[Tensor]]:
    """Losses of the steps, and the parameters after them, in float32."""
    torch.manual_seed(0)
    given = training(expert_bias_rate=0.02 if changed.get("routing") == "biased" else 0.0, compiler="eager")
    trainer = parallelize(build(**changed).float(), plan, world=world, **given)
    losses = [trainer.step(batch).loss for batch in batches()]
    return losses, [value.clone() for _, value in trainer.full_parameters()]


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan, changed",
    [
        ("dp=2 ep=2 microbatches=3 zero=1", {}),
        ("dp=2 ep=2 microbatches=3 random=local", {}),
        ("dp=2 ep=2 microbatches=3 precision=bf16", {}),
        ("dp=2 ep=2 microbatches=3 zero=2", {"routing": "biased"}),
        ("dp=2 ep=2 microbatches=3", {"capacity": 1.0}),
        ("tp=2 microbatches=3", {"routing": "noisy"}),
        ("dp=2 ep=2 microbatches=3 compile=blocks", {"dropout": 0.0}),
    ],
)
def test_overlapped_micro_batches_have_the_bits_of_others(
    plan: str, changed: Mapping[str, Any], processes: Processes
) -> None:
    found = run(2, trained, on=processes, args=(f"{plan} {KEY}", changed))
    for one, other in zip(found, run(2, trained, on=processes, args=(plan, changed)), strict=True):
        assert one[0] == other[0]
        assert all(map(torch.equal, one[1], other[1]))


def order_of_exchanges(world: World, plan: str) -> list[Any]:
    """Return what the rank was doing at each exchange of tokens in a step."""
    trainer = parallelize(build, plan, world=world, **training())
    trainer.step(batches()[0])
    trainer.step(batches()[0])
    own, move = [], world.flight_recorder.write

    def write(record: Any, **given: Any) -> None:
        doing = world.flight_recorder.doing
        if record.kind == "all_to_all" and isinstance(doing, Action):
            own.append((doing.kind.name, doing.microbatch))
        move(record, **given)

    world.flight_recorder.write = write  # type: ignore[method-assign]
    trainer.step(batches()[0])
    return own


def test_forward_and_backward_of_two_micro_batches_alternate() -> None:
    """Each mixture of three exchanges counts and tokens twice in the forward, and tokens twice in the backward."""
    plan = "dp=2 ep=2 microbatches=2"
    for own in run(2, order_of_exchanges, args=(f"{plan} {KEY}",)):
        assert own[:9] == [("F", 0)] * 9
        assert own[9:21] == [("F", 1), ("B", 0)] * 6
        assert own[21:] == [("F", 1)] * 3 + [("B", 1)] * 6
    for own in run(2, order_of_exchanges, args=(plan,)):
        assert own == [*[("F", 0)] * 9, *[("B", 0)] * 6, *[("F", 1)] * 9, *[("B", 1)] * 6]


# ---- what fails --------------------------------------------------------------------------------------------------


def fail(_gradient: Tensor) -> None:
    raise ZeroDivisionError("in the backward")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_of_either_side_ends_the_step_and_the_next_step_runs(where: str) -> None:
    def main(world: World) -> Any:
        broken: list[bool] = []

        def loss(output: Tensor, batch: Any) -> tuple[Tensor, Any]:
            total, count = next_token_loss(output, batch)
            if broken and broken.pop(0):
                if where == "forward":
                    raise ZeroDivisionError("in the forward")
                total.register_hook(fail)
            return total, count

        given = {**training(), "loss": loss}
        trainer = parallelize(build, f"dp=2 ep=2 microbatches=3 {KEY}", world=world, **given)
        broken += [False, where == "forward", False] if where == "forward" else [True, False, False]
        with pytest.raises(ZeroDivisionError, match=where):
            trainer.step(batches()[0])
        broken.clear()
        return outcome(trainer, batches=batches())

    for found in run(2, main):
        agree(found, expected(), bound=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("since", [0, 1])
@pytest.mark.parametrize("plan", ["dp=2 ep=2", "cp=2"])
def test_a_model_that_repeats_parts_of_its_forward_is_refused_in_every_step(
    plan: str, since: int, reentrant: bool
) -> None:
    """Each model checkpoints from its step number `since` on."""

    def main(world: World) -> None:
        model = build(dropout=0.0)
        attention = model.get_submodule("blocks.1.attention")
        compute = attention.forward
        repeated = functools.partial(checkpoint, compute, use_reentrant=reentrant)

        def forward(x: Tensor) -> Any:
            return (repeated if vars(attention).get("gradient_checkpointing") else compute)(x)

        attention.forward = forward if since else repeated
        trainer = parallelize(model, f"{plan} microbatches=3 {KEY}", world=world, **training())
        if since:
            trainer.step(batches()[0])
            attention.gradient_checkpointing = True  # type: ignore[assignment]
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"overlap_microbatches=0, or let the model not checkpoint"):
                trainer.step(batches()[0])

    run(2, main)


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.randn_like(gradient)


@pytest.mark.parametrize("key", ["", KEY])
def test_draws_of_a_backward_are_refused_as_without_the_key(key: str) -> None:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, Any]:
        return next_token_loss(NoisyGradient.apply(output), batch)

    def main(world: World) -> None:
        given = {**training(), "loss": loss}
        trainer = parallelize(build, f"dp=2 ep=2 microbatches=3 {key}", world=world, **given)
        with pytest.raises(ValueError, match="draws random numbers in a repeated forward"):
            trainer.step(batches()[0])

    run(2, main)


def test_batch_norms_over_several_ranks_are_refused() -> None:
    def main(world: World) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
        with pytest.raises(PlanError, match="use overlap_microbatches=0, or GroupNorm or LayerNorm"):
            parallelize(model, f"dp=2 microbatches=2 {KEY}", world=world, **training())

    run(2, main)


def test_the_recorder_names_the_thread_that_computes() -> None:
    """A report of a hang shows the stack of this thread."""

    def main(world: World) -> None:
        seen: list[bool] = []

        def look(*_: Any) -> None:
            seen.append(world.flight_recorder.thread == threading.get_ident())

        model = build()
        for block in model.get_submodule("blocks").children():
            block.register_forward_hook(look)
            next(block.parameters()).register_hook(look)
        trainer = parallelize(model, f"dp=2 ep=2 microbatches=3 {KEY}", world=world, **training())
        trainer.step(batches()[0])
        assert len(seen) == 3 * 3 * 2
        assert all(seen)

    run(2, main)


@pytest.mark.parametrize("forward_ends", [False, True])
def test_an_interrupt_of_a_waiting_forward_ends_the_backward_where_it_next_hands_over(forward_ends: bool) -> None:
    reached: list[str] = []
    sides, main_thread = SideBySide(FlightRecorder()), threading.get_ident()

    def backward() -> None:
        while not sides._failed:  # a signal that comes just before the main thread waits does not wake it
            signal.pthread_kill(main_thread, signal.SIGINT)
            end = time.monotonic() + 5
            while not sides._failed and time.monotonic() < end:
                time.sleep(0.01)
        sides.hand_over()
        reached.append("the next computation")

    turn: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def forward(backward: Callable[[], None]) -> None:
        with sides.running(backward, turn=turn, streams=streams_of(torch.device("cpu"))):
            if not forward_ends:
                sides.hand_over()

    with pytest.raises(KeyboardInterrupt):
        forward(backward)
    assert not reached
    forward(lambda: reached.append("the next step"))
    assert reached == ["the next step"]


@pytest.mark.parametrize(
    "plan, nearest",
    [
        ("dp=2", "dp=2 microbatches=2 overlap_microbatches=1"),
        ("dp=2 pp=2 microbatches=2", "dp=2 pp=2 microbatches=2"),
        ("dp=2 zero=3 microbatches=2", "dp=2 zero=2 microbatches=2 overlap_microbatches=1"),
        ("dp=2 microbatches=2 recompute=full", "dp=2 microbatches=2 overlap_microbatches=1"),
        ("dp=2 ep=2 chunk=8 microbatches=2", "dp=2 ep=2 microbatches=2 overlap_microbatches=1"),
        ("dp=2 microbatches=2 offload=activations:cpu", "dp=2 microbatches=2 overlap_microbatches=1"),
    ],
)
def test_plans_that_repeat_or_gather_in_the_backward_are_refused(plan: str, nearest: str) -> None:
    with pytest.raises(PlanError, match=re.escape(f"Nearest that works: '{nearest}'")):
        Plan.parse(f"{plan} {KEY}")
