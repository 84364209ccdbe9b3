"""A few blocks of a stack tell what all of them do, to the last entry, or they are all run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer
from meshwise.model.deferred_init import ParameterSource, shapes_of
from meshwise.plan import Plan
from meshwise.reference.gpt import Block
from meshwise.simulate import recorded_rank as part
from meshwise.simulate.block_growth import BlockGrowth, UnevenError
from meshwise.simulate.block_stack import LEAST, NONE
from meshwise.simulate.cluster import parse_cluster
from meshwise.simulate.memory_use import memory_of
from meshwise.simulate.prediction import predict
from meshwise.simulate.rehearsal import Rehearsal, find_stack, rehearse
from meshwise.simulate.rehearsal_subject import Device, RehearsalSubject
from simulate.subjects import CONFIG, gpt_subject, loss

HIGH = replace(CONFIG, layers=LEAST + 1)

PLANS: Sequence[tuple[str, Device]] = (
    ("dp=4 random=local", "cpu"),
    ("dp=4 zero=1 microbatches=4", "cuda"),
    ("dp=4 zero=2 microbatches=2 recompute=full", "cpu"),
    ("dp=4 zero=3 recompute=selective", "cpu"),
    ("dp=4 zero=3 microbatches=4 precision=bf16 wire=fp32", "cuda"),
    ("dp=2 tp=2 random=global", "cpu"),
    ("dp=2 tp=2 zero=3 sequence_parallel=1 precision=bf16", "cuda"),
    ("dp=2 tp=2 zero=1 sequence_parallel=1 recompute=full microbatches=2", "cpu"),
    ("tp=4 tp_mode=2d", "cuda"),
    ("dp=2 tp=4 tp_mode=2d zero=3 recompute=selective", "cpu"),
    ("tp=8 tp_mode=3d", "cuda"),
    ("tp=8 tp_mode=2.5d tp_depth=2 zero=2 precision=fp16", "cuda"),
)


def _rehearsed(subject: RehearsalSubject, plan: str, device: Device = "cpu") -> Rehearsal:
    size = Plan.parse(plan).mesh().size
    return rehearse(subject, plan=plan, ranks=size, device=device, shared=device == "cpu")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks the models have that are put under a plan."""
    counted: list[int] = []

    def counting(source: ParameterSource, *given: Any, **named: Any) -> Trainer:
        counted.append(sum(isinstance(module, Block) for module in source.module.modules()))
        return parallelize(source, *given, **named)

    monkeypatch.setattr(part, "parallelize", counting)
    return counted


@pytest.mark.parametrize("plan, device", PLANS)
def test_a_few_blocks_tell_what_all_of_them_do(plan: str, device: Device, run: list[int]) -> None:
    subject = gpt_subject(replace(HIGH, dropout=0.1) if "random" in plan else HIGH)
    short, long = (_rehearsed(one, plan, device) for one in (subject, replace(subject, stack=NONE)))
    assert run == [3, 4, 5, HIGH.layers]
    assert short.tapes == long.tapes
    cluster = parse_cluster("1x8 h100")
    assert predict(short, cluster=cluster).seconds == predict(long, cluster=cluster).seconds
    assert memory_of(short) == memory_of(long)


@pytest.mark.parametrize(
    "plan",
    ["pp=2 microbatches=2 partition=params", "dp=2 offload=optimizer:disk", "dp=2 recompute=full budget=1G"],
)
def test_blocks_that_a_plan_tells_apart_are_all_run(plan: str, run: list[int]) -> None:
    _rehearsed(gpt_subject(HIGH), plan)
    assert set(run) == {HIGH.layers}


def test_blocks_that_a_name_tells_apart_are_all_run(run: list[int]) -> None:
    _rehearsed(gpt_subject(HIGH, recomputed=("blocks.7",)), "dp=2 recompute=full")
    _rehearsed(gpt_subject(HIGH, parameter_options=_decays_late), "dp=2")
    assert run == [HIGH.layers, HIGH.layers]


def _decays_late(name: str, parameter: Tensor) -> Mapping[str, Any]:
    return {"weight_decay": 0.1} if name.startswith("blocks.19") else {}


class Chosen(nn.Module):
    """Linear blocks, of which its forward treats some in their own way."""

    def __init__(self, own: Callable[[int], bool], *, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2 * LEAST))
        if tied:
            self.blocks[-1] = self.blocks[0]
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = self.apart(block, x) if self.own(index) else block(x)
        return x

    def apart(self, block: nn.Module, x: Tensor) -> Tensor:
        """What its own way is."""
        out: Tensor = block(x).relu()
        return out


class Repeated(Chosen):
    """Some are run again in the backward."""

    def apart(self, block: nn.Module, x: Tensor) -> Tensor:
        """Not to be seen in a forward."""
        out: Tensor = checkpoint(block, x, use_reentrant=False)
        return out


class Frozen(Chosen):
    """Some have no gradient."""

    def apart(self, block: nn.Module, x: Tensor) -> Tensor:
        """Not to be seen in a forward either."""
        with torch.no_grad():
            out: Tensor = block(x)
        return out


@pytest.mark.parametrize(
    "model, count",
    [
        (Chosen(lambda _: False), 2 * LEAST),
        (Chosen(lambda index: index == 0), 2 * LEAST),
        (Chosen(lambda index: index == LEAST), 0),
        (Chosen(lambda index: index % 2 == 0), 0),
        (Repeated(lambda index: index < LEAST), 0),
        (Frozen(lambda index: index < LEAST), 0),
        (Chosen(lambda _: False, tied=True), 2 * LEAST - 2),
        (Chosen(lambda index: index > 0 and bool(torch.empty(()) > index)), 0),
        (nn.Sequential(*[nn.Linear(4, 4) for _ in range(LEAST - 1)]), 0),
    ],
    ids=["alike", "first", "middle", "alternating", "repeated", "frozen", "tied", "of values", "few"],
)
def test_a_stack_is_of_blocks_that_the_model_treats_alike(model: nn.Module, count: int) -> None:
    subject = RehearsalSubject(model, loss, torch.zeros(4, 4))
    assert find_stack(subject, source=shapes_of(model, seed=0)).count == count


def test_what_each_block_adds_is_added_once_more() -> None:
    growth = BlockGrowth.of(["abxyxycduu", "abxyxyxycduuu", "abxyxyxyxycduuuu"])
    assert "".join("abxyxycduu"[index] for index, _ in growth.places(3)) == "abxyxyxyxyxycduuuuu"


@pytest.mark.parametrize(
    "three",
    [("axb", "axxb", "axxxxb"), ("axb", "axyb", "axyyb"), ("axb", "axb", "axxb"), ("axxb", "axb", "ab")],
)
def test_what_grows_unevenly_is_not_grown(three: tuple[str, str, str]) -> None:
    with pytest.raises(UnevenError):
        BlockGrowth.of(three)
