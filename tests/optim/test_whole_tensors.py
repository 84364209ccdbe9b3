"""Optimizer classes of torch and of libraries give under every plan, by `whole`, what they give on one process."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from grid import Grid, ranks_of
from last_outcome import alone, outcome
from meshwise import Plan, PlanError
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.model.whole_parameters import LogicalTensors
from meshwise.optim import Several, whole
from meshwise.precision.dtype_policy import LossScale
from meshwise.reference import MixtureConfig, MixtureGPT, next_token_loss
from meshwise.simulate.predicted_memory import memory_of
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_tape import Category
from meshwise.testing import agree, run
from meshwise.train.job_settings import JobError, OptimizerJob
from meshwise.train.objects_by_name import optimizer
from meshwise.verify import verify
from optim.test_large_batch_optimizers import batches, build

SHAPES = ("", "tp=2", "tp=4 tp_mode=2d", "pp=2 microbatches=2", "pp=2 tp=2 microbatches=2", "tp=3")


def kind_and_arguments(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return a class and its arguments. A larger eps keeps gradients that are only rounding from being normalized."""
    if name == "adafactor":
        return torch.optim.Adafactor, {"lr": 0.02, "weight_decay": 0.1, "eps": (1e-8, 1e-3)}
    if name == "adafactor of transformers":
        found = pytest.importorskip("transformers.optimization").Adafactor
        arguments = {"scale_parameter": True, "relative_step": False, "eps": (1e-16, 1e-3), "beta1": 0.9}
        return found, {"lr": 0.02, **arguments}
    if name == "shampoo":
        return pytest.importorskip("pytorch_optimizer").Shampoo, {"lr": 0.02, "momentum": 0.9, "matrix_eps": 1e-4}
    return torch.optim.AdamW, {"lr": 0.01}


NAMES = ("adafactor", "adafactor of transformers", "shampoo", "adamw")


@functools.cache
def expected(name: str, *, tied: bool) -> Any:
    kind, arguments = kind_and_arguments(name)
    model = functools.partial(build, tied=tied)
    return alone(model, loss=next_token_loss, batches=batches(), optimizer=kind, **arguments)


def trained(world: World, *, plan: str, tied: bool, name: str) -> Any:
    kind, arguments = kind_and_arguments(name)
    options = Options(example=batches()[0])
    model = functools.partial(build, tied=tied)
    trainer = parallelize(
        model, plan, loss=next_token_loss, world=world, options=options, optimizer=whole(kind), **arguments
    )
    return outcome(trainer, batches=batches())


@pytest.mark.grid(
    Grid(
        {"name": NAMES, "shape": SHAPES, "dp": (1, 2, 3), "zero": (0, 1, 2, 3), "tied": (False, True)},
        cost=lambda cell: ranks_of(f"{cell['shape']} dp={cell['dp']}") * (8 if cell["dp"] == 1 else 1),
        exists=lambda cell: (
            ranks_of(f"{cell['shape']} dp={cell['dp']}") <= 8
            and not (cell["zero"] and cell["dp"] == 1)
            and not (cell["zero"] > 1 and "pp" in cell["shape"])
        ),
        # By the access to whole tensors that the optimizers of test_large_batch_optimizers.py use under every shape.
        strength=1,
        heavy=lambda cell: cell["shape"] in SHAPES[4:] or ranks_of(f"{cell['shape']} dp={cell['dp']}") > 4,
    )
)
def test_a_plan_gives_what_the_class_gives_on_one_process(
    name: str, shape: str, dp: int, zero: int, tied: bool
) -> None:
    plan, single = f"{shape} dp={dp} zero={zero}", expected(name, tied=tied)
    for rank in run(Plan.of(plan).mesh().size, functools.partial(trained, plan=plan, tied=tied, name=name)):
        agree(rank, single, bound=1e-9)


@pytest.mark.grid(
    Grid({"name": ("adafactor", "shampoo"), "plan": ("dp=2 tp=2 zero=1", "pp=2 microbatches=2")}, strength=1)
)
def test_state_of_any_shape_is_loaded_under_another_plan(name: str, plan: str, tmp_path: Any) -> None:
    """Rows and columns of Adafactor, and the preconditioners and the count in the group of Shampoo, on their owners."""
    kind, arguments = kind_and_arguments(name)

    def train(world: World, *, plan: str, begin: int, end: int) -> Any:
        options, model = Options(example=batches()[0]), functools.partial(build, tied=True)
        trainer = parallelize(
            model, plan, loss=next_token_loss, world=world, options=options, optimizer=whole(kind), **arguments
        )
        if begin:
            trainer.load(tmp_path / "saved")
        steps = outcome(trainer, batches=batches()[begin:end])
        if not begin:
            trainer.save(tmp_path / "saved")
        return steps

    run(3, functools.partial(train, plan="dp=3 zero=3", begin=0, end=2))
    later = run(Plan.of(plan).mesh().size, functools.partial(train, plan=plan, begin=2, end=3))
    agree(later[0], expected(name, tied=True)[2:], bound=1e-9)


MODELS: dict[str, Any] = {
    "gpt": functools.partial(build, tied=True),
    "mixture": lambda: MixtureGPT(MixtureConfig(vocabulary=16, context=4, layers=1, heads=4, width=12)).double(),
}


DIVISIONS = (
    "cp=2 dp=2 zero=3",
    "dp=2x2 zero=2",
    "tp=8 tp_mode=2.5d tp_depth=2",
    "pp=2 microbatches=4 schedule=zb-v virtual_stages=2",  # a rank has both copies of the tied parameter
    "dp=2 ep=2 tp=2 zero=3",
)


@pytest.mark.grid(Grid({"plan": DIVISIONS}, heavy=lambda cell: ranks_of(cell["plan"]) > 4))
def test_other_divisions_agree_with_clipped_gradients(plan: str) -> None:
    model = "mixture" if "ep=" in plan else "gpt"
    kind, arguments = kind_and_arguments("adafactor")
    options = functools.partial(Options, clip_norm=0.5)

    def main(world: World) -> Any:
        own = options(example=batches()[0])
        trainer = parallelize(
            MODELS[model], plan, loss=next_token_loss, world=world, options=own, optimizer=whole(kind), **arguments
        )
        return outcome(trainer, batches=batches())

    single = alone(
        MODELS[model], loss=next_token_loss, batches=batches(), optimizer=kind, options=options(), **arguments
    )
    for rank in run(Plan.of(plan).mesh().size, main):
        agree(rank, single, bound=1e-9)


@pytest.mark.grid(
    Grid(
        {"plan": ("dp=2 zero=1 precision=bf16", "dp=2 zero=3 tp=2 precision=bf16")},
        heavy=lambda cell: "zero=1" in cell["plan"],
    )
)
def test_masters_are_updated_in_fp32(plan: str) -> None:
    kind, arguments = kind_and_arguments("adafactor")
    verified = verify(
        lambda: build(tied=True).float(), next_token_loss, batches(), plan, optimizer=whole(kind), **arguments
    )
    assert verified.ok, str(verified)


def test_a_skipped_step_of_fp16_changes_no_state() -> None:
    kind, arguments = kind_and_arguments("adafactor")

    def main(world: World) -> Any:
        options = Options(loss_scale=LossScale(value=2.0**40))
        model = lambda: build(tied=True).float()  # noqa: E731
        trainer = parallelize(
            model,
            "dp=2 zero=1 precision=fp16",
            loss=next_token_loss,
            world=world,
            options=options,
            optimizer=whole(kind),
            **arguments,
        )
        skipped = [trainer.step(batches()[0]).skipped, trainer.memory()["optimizer"]]
        while trainer.step(batches()[0]).skipped:
            pass
        steps = {int(state["step"]) for state in trainer.optimizer.state.values() if state}
        return skipped, steps

    assert run(2, main) == [([True, 0], {1})] * 2


def test_torchs_muon_agrees_as_far_as_its_bfloat16_does() -> None:
    """torch rounds the momentum to bfloat16: a difference of 1e-16 may flip a rounding, of 2⁻⁸ of a number."""
    optimizers = {"hidden": (whole(torch.optim.Muon), {"lr": 0.02}), "rest": (torch.optim.AdamW, {"lr": 0.01})}

    def main(world: World) -> Any:
        model = functools.partial(build, tied=True)
        plan = "dp=2 tp=2 zero=2"
        trainer = parallelize(model, plan, loss=next_token_loss, world=world, optimizer=Several, optimizers=optimizers)
        return outcome(trainer, batches=batches())

    single = alone(
        functools.partial(build, tied=True),
        loss=next_token_loss,
        batches=batches(),
        optimizer=Several,
        optimizers=optimizers,
    )
    for rank in run(4, main):
        agree(rank, single, bound=2e-2)


def test_state_is_on_one_rank_and_as_predicted() -> None:
    """A matrix (n, m) has n + m numbers of state, a vector n, and a parameter one count, all fp32."""
    model, batch = (lambda: build(tied=False).float()), batches()[0]
    kind = whole(torch.optim.Adafactor)
    arguments: dict[str, Any] = {"lr": 0.01}

    def main(world: World) -> Any:
        trainer = parallelize(model, "dp=2 zero=1", loss=next_token_loss, world=world, optimizer=kind, **arguments)
        trainer.step(batch)
        return trainer.memory()["optimizer"]

    shapes = [tuple(p.shape) for p in model().parameters()]
    held = run(2, main)
    assert sum(held) == sum(4 * (1 + sum(shape)) for shape in shapes)
    subject = RehearsalSubject(model, next_token_loss, batch, kind, arguments, Options())
    [rank] = memory_of(rehearse(subject, plan="dp=2 zero=1", ranks=2))
    assert 0 <= rank.rest[Category.OPTIMIZER] - held[0] <= 4 * len(shapes)  # the keys of the state


@pytest.mark.parametrize("zero, gathered, returned", [(0, 0, 1), (1, 2, 1), (3, 2, 1)])
def test_values_and_gradients_travel_to_the_owner_and_values_back(zero: int, gathered: int, returned: int) -> None:
    """Bytes that all ranks together pass to all-to-alls, each with its own part."""
    kind, arguments = kind_and_arguments("adafactor")

    def main(world: World) -> int:
        model = functools.partial(build, tied=False)
        plan = f"dp=2 zero={zero}"
        trainer = parallelize(model, plan, loss=next_token_loss, world=world, optimizer=whole(kind), **arguments)
        with world.record() as records:
            trainer.step(batches()[0])
        return sum(record.bytes for record in records if record.kind == "all_to_all")

    size = 8 * sum(p.numel() for p in build(tied=False).parameters())
    assert sum(run(2, main)) == size * (gathered + returned * (2 if zero == 0 else 1))


class _Counted(torch.optim.SGD):
    """SGD with the rate times the number of the step, which it writes into its group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # noqa: ARG002
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"] * group["count"])


def test_a_schedule_sets_the_rate_of_a_class_that_counts_in_its_group() -> None:
    p = nn.Parameter(torch.ones(2, 3))
    optimizer = whole(_Counted)([p], logical=LogicalTensors({"p": p}), lr=1.0)  # type: ignore[call-arg]
    for lr in (1.0, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        p.grad = torch.ones(2, 3)
        optimizer.step()
    assert p.tolist() == [[1 - 1 - 0.25 * 2] * 3] * 2


class _Together(torch.optim.SGD):
    """A step whose length depends on all parameters."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: (torch.optim.Adafactor, {}),
            r"rows and columns; run it on whole tensors: .*whole\(Adafactor\), in a ",
        ),
        (lambda: (whole(torch.optim.LBFGS), {}), "LBFGS cannot run on slices of parameters: it takes inner products"),
        (lambda: (whole(torch.optim.SparseAdam), {}), "needs sparse gradients, and buckets are dense; use AdamW"),
        (lambda: (whole("Adafactor"), {}), r"whole\('Adafactor'\) needs an optimizer class: whole\(torch.optim"),  # type: ignore[arg-type]
        (lambda: (whole(torch.optim.Muon), {}), r"Muon refuses '.*' of shape \(\d+,\): Muon only supports 2D"),
        (lambda: (whole(_Together), {"lr": 0.1}), r"_Together updates a parameter by values of others.*off by up to"),
    ],
)
def test_what_cannot_run_is_refused(make: Any, message: str) -> None:
    def train() -> None:
        kind, arguments = make()
        parallelize(functools.partial(build, tied=False), "dp=1", loss=next_token_loss, optimizer=kind, **arguments)

    with pytest.raises(ValueError, match=message):
        train()


def test_replicas_that_differ_are_refused() -> None:
    kind, arguments = kind_and_arguments("adafactor")

    def main(world: World) -> None:
        model, plan = functools.partial(build, tied=False), "dp=2 sync=diloco every=2"
        parallelize(model, plan, loss=next_token_loss, world=world, optimizer=whole(kind), **arguments)

    with pytest.raises(PlanError, match=r"whole\(\) keeps whole tensors; use sync=step"):
        run(2, main)


def test_a_job_names_a_class_to_run_on_whole_tensors() -> None:
    kind, arguments = optimizer(OptimizerJob("whole:Adafactor", lr=0.02))
    assert (kind.__name__, arguments) == ("whole(Adafactor)", {"lr": 0.02})
    assert optimizer(OptimizerJob("whole:torch.optim:Adafactor"))[0].__name__ == "whole(Adafactor)"
    with pytest.raises(JobError, match=r'in a job name = "whole:Adafactor"'):
        optimizer(OptimizerJob("Adafactor"))
