"""What a job takes or refuses of odd models, losses and optimizers, its rehearsal does, with the same words."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from grid import Grid
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.engine.parallelize import Options, parallelize
from meshwise.model.forward import Loss
from meshwise.plan import Plan
from meshwise.simulate.rehearsal import Device, RehearsalSubject, rehearse
from meshwise.simulate.step_tape import TapeOperation

WIDTH, WORDS = 8, 12


class Net(nn.Module):
    """A stack between an embedding and a head."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def sparse() -> nn.Module:
    return Net(sparse=True)


class Wide(Net):
    """Its head is of another dtype than what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.head.double()


class Held(Net):
    """Holds a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words) * self.scale


class Listed(Net):
    """Holds a module where torch does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Linear(WORDS, WORDS)]

    def forward(self, words: Tensor) -> Tensor:
        return self.more[0](super().forward(words))  # type: ignore[no-any-return]


class Pruned(Net):
    """Its head's matrix is made anew in each forward, and held as a plain attribute in between."""

    def __init__(self) -> None:
        super().__init__()
        prune.identity(self.head, "weight")


class Counting(Net):
    """Has a parameter of integers, which is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False)


class Divided(nn.Sequential):
    """Divides by a tensor that it makes in its forward, on no device in particular."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / torch.sqrt(torch.tensor(WIDTH))  # type: ignore[no-any-return]


class Dividing(Net):
    """Its blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Divided(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))


class Recurrent(nn.Module):
    """What tensor parallelism has no part for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.body(self.embed(words))[0])  # type: ignore[no-any-return]


class Inferring(Net):
    """Runs a block, and in training its embedding, without a gradient as in inference."""

    def forward(self, words: Tensor) -> Tensor:
        with torch.inference_mode():
            x, y = self.embed(words), self.blocks[0](self.embed(words))
        x = x.clone() + y
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def entropy(output: Tensor, words: Tensor) -> tuple[Tensor, int]:
    total = functional.cross_entropy(output.flatten(0, 1), words.flatten(), reduction="sum")
    return total, words.numel()


def counted(count: Any) -> Loss:
    return lambda output, words: (entropy(output, words)[0], count)


SGD, ADAGRAD, ADAMW = torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW
PIPELINE = "pp=2 microbatches=2 partition=params"


@dataclass(frozen=True)
class AsModule:
    """The model is to be given as a module, each rank its own."""

    build: Callable[[], nn.Module]


def both(model: Any, plan: str, *, loss: Loss = entropy, optimizer: Any = ADAMW, **rest: Any) -> list[str]:
    """What becomes of a rehearsal, and of two steps of a job, of a model that a function builds."""
    words, ranks = torch.zeros(4, 3, dtype=torch.long), Plan.parse(plan).mesh().size
    options = Options(example=words)
    given = model.build if isinstance(model, AsModule) else lambda: model

    def job(world: World) -> None:
        trainer = parallelize(given(), plan, loss=loss, optimizer=optimizer, world=world, options=options, **rest)
        for _ in range(2):
            trainer.step(words)

    subject = RehearsalSubject(given(), loss, words, optimizer=optimizer, arguments=rest, options=options)
    return [_outcome(lambda: rehearse(subject, plan=plan, ranks=ranks)), _outcome(lambda: run_threads(ranks, job))]


def _outcome(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:  # noqa: BLE001 -- whatever it is, the other has to raise it too
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return "taken"


UPDATES: Any = {
    "SGD": (SGD, {}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (ADAGRAD, {}),
    "AdamW": (ADAMW, {"lr": torch.tensor(1e-3)}),
}
SHARDED = ("dp=1", "dp=2 zero=1", "dp=2 zero=2 offload=optimizer:disk", PIPELINE)


@pytest.mark.grid(Grid({"plan": SHARDED, "update": tuple(UPDATES)}, strength=1))
def test_fused_updates_are_rehearsed(plan: str, update: str) -> None:
    optimizer, arguments = UPDATES[update]
    assert both(Net, plan, optimizer=optimizer, **arguments) == ["taken"] * 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fused_updates_take_their_time(device: Device) -> None:
    subject = RehearsalSubject(Net, entropy, torch.zeros(4, 3, dtype=torch.long), optimizer=SGD)
    entries = [
        entry for part in rehearse(subject, plan="dp=1", ranks=1, device=device).steps[0] for entry in part.entries
    ]
    updates = [entry for entry in entries if isinstance(entry, TapeOperation) and entry.name == "_fused_sgd_"]
    numel = sum(parameter.numel() for parameter in Net().parameters())
    assert sum(entry.bytes for entry in updates) >= 2 * 4 * numel


ODD: dict[str, Any] = {
    "held": AsModule(Held),
    "pruned": Pruned,
    "built and pruned": AsModule(Pruned),
    "counting": Counting,
    "sparse": sparse,
    "built and sparse": AsModule(sparse),
}


@pytest.mark.grid(
    Grid({"model": tuple(ODD), "plan": ("dp=1", PIPELINE)}, strength=1, cost=lambda cell: 1 + (cell["plan"] == "dp=1"))
)
def test_odd_models_are_accepted_by_job_and_rehearsal(model: str, plan: str) -> None:
    """With a pipeline, which also looks for cuts, wherever a part of the cells has to do."""
    assert both(ODD[model], plan) == ["taken"] * 2


@pytest.mark.parametrize("plan", ["dp=1 recompute=full", f"{PIPELINE} recompute=selective"])
def test_blocks_that_name_no_device_are_recomputed_by_job_and_rehearsal(plan: str) -> None:
    assert both(Dividing, plan) == ["taken"] * 2


@pytest.mark.parametrize("plan", ["dp=2", PIPELINE])
def test_products_of_two_dtypes_are_taken_by_both_under_autocast(plan: str) -> None:
    assert both(Wide, f"{plan} precision=bf16") == ["taken"] * 2


@pytest.mark.parametrize("plan", ["dp=2", PIPELINE])
def test_labels_of_bytes_are_accepted_by_job_and_rehearsal(plan: str) -> None:
    def loss(output: Tensor, words: Tensor) -> tuple[Tensor, int]:
        return entropy(output, words.byte())

    assert both(Net, plan, loss=loss) == ["taken"] * 2


@pytest.mark.parametrize(
    "model, plan, rest, message",
    [
        (Recurrent, "tp=2", {}, "PlanError: tensor parallelism found no role for"),
        (Recurrent, "pp=2 tp=2 microbatches=2", {}, "PlanError: tensor parallelism found no role for"),
        (Net, "dp=2", {"optimizer": partial(SGD, lr=0.1)}, "ValueError: optimizer=functools.partial"),
        (Net, "dp=2", {"loss": counted(float("inf"))}, "LossError: the count that loss returned is inf"),
        (AsModule(lambda: nn.LazyLinear(3)), "dp=2", {}, "ValueError: weight has no shape yet"),
        (Listed, "dp=2", {}, "ValueError: more holds modules that torch does not register there"),
        (nn.ReLU, "dp=2", {}, "ValueError: ReLU has no parameters; there is nothing to train"),
        (nn.ReLU, PIPELINE, {}, "ValueError: ReLU has no parameters; there is nothing to train"),
        (AsModule(nn.ReLU), PIPELINE, {}, "ValueError: ReLU has no parameters; there is nothing to train"),
    ],
)
def test_odd_models_are_refused_by_job_and_rehearsal(model: Any, plan: str, rest: Any, message: str) -> None:
    rehearsed, ran = both(model, plan, **rest)
    assert rehearsed == ran
    assert rehearsed.startswith(message)


def test_a_count_may_be_a_number_of_numpy() -> None:
    assert both(Net, "dp=1", loss=counted(np.int64(12))) == ["taken"] * 2


def test_a_batch_without_rows_is_refused() -> None:
    words = torch.zeros(0, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="the batch has no rows"):
        rehearse(RehearsalSubject(Net, entropy, words), plan=PIPELINE, ranks=2)
    options = Options(example=words)
    with pytest.raises(ValueError, match=r"the batch in Options\(example=batch\) has no rows"):
        run_threads(2, lambda world: parallelize(Net, PIPELINE, loss=entropy, world=world, options=options))


@pytest.mark.parametrize("plan", ["dp=1", "dp=2 zero=3", "dp=2 zero=3 microbatches=2 precision=bf16", PIPELINE])
def test_inference_mode_is_accepted_by_job_and_rehearsal(plan: str) -> None:
    assert both(Inferring, plan) == ["taken"] * 2
