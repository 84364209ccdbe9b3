"""LARS, LAMB, Muon and Several give under every plan what they give on one process."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from grid import Grid, ranks_of
from last_outcome import alone, outcome
from meshwise import Plan
from meshwise.comm.api.world import World
from meshwise.data_parallel.whole_parameter_functions import LogicalSlices
from meshwise.engine.parallelize import Options, parallelize
from meshwise.model.whole_parameters import LogicalTensors
from meshwise.optim import LAMB, LARS, Muon, Several, parameter_rule
from meshwise.optim.lars_lamb_muon import orthogonalize
from meshwise.reference import GPT, GPTConfig, MixtureConfig, MixtureGPT, next_token_loss
from meshwise.testing import agree, run
from meshwise.verify import verify

SGD_AND_LAMB = {"hidden": (LAMB, {"lr": 0.02}), "rest": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}
TRAININGS: dict[str, dict[str, Any]] = {
    "lars": {"optimizer": LARS, "lr": 5.0, "momentum": 0.9, "weight_decay": 0.1},
    "lamb": {"optimizer": LAMB, "lr": 0.02, "weight_decay": 0.1, "vectors": True},
    "muon": {
        "optimizer": Several,
        "optimizers": {"hidden": (Muon, {"lr": 0.02}), "rest": (torch.optim.AdamW, {"lr": 0.01})},
    },
    "sgd and lamb": {"optimizer": Several, "optimizers": SGD_AND_LAMB},
}
SHAPES = ("", "tp=2", "tp=4 tp_mode=2d", "pp=2 microbatches=2", "pp=2 tp=2 microbatches=2", "tp=3")


def build(*, tied: bool) -> GPT:
    shape = GPTConfig(vocabulary=16, context=4, layers=2, heads=4, width=12, mlp_ratio=2, tied=tied, bias=True)
    return GPT(shape).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(16, (rows, 5), generator=generator) for rows in (6, 5, 4)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


@functools.cache
def expected(name: str, *, tied: bool) -> Any:
    return alone(functools.partial(build, tied=tied), loss=next_token_loss, batches=batches(), **TRAININGS[name])


def trained(plan: str, *, tied: bool, options: Options | None = None, **training: Any) -> list[Any]:
    def main(world: World) -> Any:
        trainer = parallelize(
            functools.partial(build, tied=tied),
            plan,
            loss=next_token_loss,
            world=world,
            options=options or Options(example=batches()[0]),
            **training,
        )
        return outcome(trainer, batches=batches())

    return run(Plan.of(plan).mesh().size, main)


@pytest.mark.grid(
    Grid(
        {"optimizer": tuple(TRAININGS), "shape": SHAPES, "dp": (1, 2, 3), "zero": (0, 1, 2, 3), "tied": (False, True)},
        cost=lambda cell: ranks_of(f"{cell['shape']} dp={cell['dp']}") * (8 if cell["dp"] == 1 else 1),
        exists=lambda cell: (
            ranks_of(f"{cell['shape']} dp={cell['dp']}") <= 8
            and not (cell["zero"] and cell["dp"] == 1)
            and not (cell["zero"] > 1 and "pp" in cell["shape"])
        ),
        heavy=lambda cell: ranks_of(f"{cell['shape']} dp={cell['dp']}") > 6,
        single=("shape", "dp", "tied"),
    )
)
def test_a_plan_gives_what_one_process_gives(optimizer: str, shape: str, dp: int, zero: int, tied: bool) -> None:
    for rank in trained(f"{shape} dp={dp} zero={zero}", tied=tied, **TRAININGS[optimizer]):
        agree(rank, expected(optimizer, tied=tied), bound=1e-9)


DIVISIONS = ("cp=2 dp=2 zero=3", "dp=4 ep=2 zero=3", "dp=2 tp=2 ep=2 etp=2")


@pytest.mark.grid(Grid({"optimizer": ("lars", "lamb", "muon"), "plan": DIVISIONS}, strength=1))
def test_a_mixture_and_split_tokens_give_what_one_process_gives(optimizer: str, plan: str) -> None:
    def mixture() -> nn.Module:
        shape = MixtureConfig(vocabulary=16, context=4, layers=2, heads=4, width=12, mlp_ratio=2, experts=4)
        return MixtureGPT(shape).double()

    def main(world: World) -> Any:
        trainer = parallelize(mixture, plan, loss=next_token_loss, world=world, **TRAININGS[optimizer])
        return outcome(trainer, batches=batches())

    single = alone(mixture, loss=next_token_loss, batches=batches(), **TRAININGS[optimizer])
    for rank in run(Plan.of(plan).mesh().size, main):
        agree(rank, single, bound=1e-9)


@pytest.mark.parametrize("nesterov, dtype", [(True, None), (False, None), (True, "bfloat16")])
def test_muon_in_bfloat16_has_the_numbers_of_torch(nesterov: bool, dtype: str | None) -> None:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator) for shape in ((6, 4), (4, 6), (5, 5))]
    theirs, ours = ([nn.Parameter(each.clone()) for each in start] for _ in range(2))
    names = LogicalTensors({str(number): parameter for number, parameter in enumerate(ours)})
    arguments: dict[str, Any] = {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
    torchs = torch.optim.Muon(theirs, **arguments)
    muon = Muon(ours, logical=names, dtype=dtype, **arguments)
    for _ in range(3):
        for one, other in zip(theirs, ours, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        torchs.step()
        muon.step()

    apart = max(float((one - other).detach().abs().max()) for one, other in zip(theirs, ours, strict=True))
    assert apart == 0 if dtype else 0 < apart < 1e-3


def test_muon_orthogonalizes() -> None:
    matrix = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrix, steps=5, coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7))
    assert 0.6 < values.min() < values.max() < 1.3
    nothing = orthogonalize(torch.zeros(2, 3), steps=1, coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7)
    assert nothing.equal(torch.zeros(2, 3))


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_lars_and_lamb_are_their_formulas(kind: Any, vectors: bool) -> None:
    """A matrix, a vector, and a matrix of zeros; the second gradients are 0. The ratio of a norm of 0 is 1."""
    generator = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)) for shape in ((5, 4), (4,))]
    ours.append(nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)))
    names = LogicalTensors({str(number): parameter for number, parameter in enumerate(ours)})
    optimizer = kind(ours, logical=names, lr=0.1, weight_decay=0.2, vectors=vectors)
    theirs = [p.detach().clone() for p in ours]
    first, second = ([torch.zeros_like(w) for w in theirs] for _ in range(2))
    for step in (1, 2, 3):
        for p, w, m, v in zip(ours, theirs, first, second, strict=True):
            p.grad = g = torch.randn(w.shape, dtype=torch.float64, generator=generator) * (step != 2)
            if kind is LARS:
                update, ratio = g + 0.2 * w, 0.001 * w.norm() / (g.norm() + 0.2 * w.norm())
            else:
                m.copy_(0.9 * m + 0.1 * g)
                v.copy_(0.999 * v + 0.001 * g * g)
                update = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-6) + 0.2 * w
                ratio = w.norm() / update.norm()
            if w.norm() > 0 and (kind is LAMB or g.norm() > 0) and (vectors or w.dim() > 1):
                update = ratio * update
            if kind is LARS:
                update = m.copy_(0.9 * m + 0.1 * update) / 0.1
            w.sub_(0.1 * update)
        optimizer.step()
        for p, w in zip(ours, theirs, strict=True):
            agree(p.detach(), w, bound=1e-12)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (6, 2, 2)])
@pytest.mark.parametrize("rate", ["original", "match_rms_adamw"])
def test_a_muon_step_is_its_formula(shape: tuple[int, ...], rate: str) -> None:
    p = nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    before = p.detach().clone()
    p.grad = torch.randn_like(before)
    muon = Muon([p], logical=LogicalTensors({"p": p}), lr=0.1, weight_decay=0.2, adjust_lr_fn=rate, ns_steps=1)
    muon.step()

    x = p.grad.flatten(1) / p.grad.norm()  # the length of the momentum does not matter
    gram = x @ x.T
    x = (3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x).reshape(shape)
    rows, columns = shape[0], 24 // shape[0]
    factor = max(1, rows / columns) ** 0.5 if rate == "original" else 0.2 * max(rows, columns) ** 0.5
    agree(p.detach(), 0.98 * before - 0.1 * factor * x, bound=1e-12)


@pytest.mark.parametrize("zero, gathered, returned", [(0, 0, 2), (1, 1, 1), (3, 1, 1)])
def test_matrices_travel_once_each_way(zero: int, gathered: int, returned: int) -> None:
    """Bytes of the all-to-alls over all ranks: n elements to the owners, n back; n to each rank under zero=0."""

    def main(world: World) -> tuple[int, int]:
        model = functools.partial(build, tied=False)
        optimizers: dict[str, Any] = {"hidden": (Muon, {}), "rest": (torch.optim.AdamW, {})}
        plan = f"dp=2 zero={zero}"
        trainer = parallelize(model, plan, loss=next_token_loss, world=world, optimizer=Several, optimizers=optimizers)
        with world.record() as records:
            trainer.step(batches()[0])
        moves = [record.bytes for record in records if record.kind == "all_to_all"]
        return len(moves), sum(moves)

    found = run(2, main)
    matrices = 8 * 2 * (12 * 36 + 12 * 12 + 2 * 12 * 24)
    assert sum(size for _, size in found) == matrices * (gathered + returned)
    assert {calls for calls, _ in found} == {4 * (1 + gathered)}


def test_verify_finds_the_norm_of_a_shard() -> None:
    class OfShards(LAMB):
        def __init__(self, params: Any, *, logical: Any, **arguments: Any) -> None:
            super().__init__(params, logical=logical, **arguments)
            if isinstance(logical, LogicalSlices):
                logical.squared_norms = self.of_slices  # type: ignore[assignment,method-assign]

        def of_slices(self, values: Any) -> dict[str, torch.Tensor]:
            parts = [(p, part) for p in values for part in self.logical.parts(p)]
            own = {part.name: values[p][part.start : part.stop].double().square().sum() for p, part in parts}
            none = torch.zeros((), dtype=torch.float64)
            return {name: own.get(name, none) for group in self.param_groups for name in self.names(group)}

    wrong, right = (
        verify(functools.partial(build, tied=False), next_token_loss, batches(), "dp=2 zero=1", optimizer=kind, lr=0.02)
        for kind in (OfShards, LAMB)
    )
    assert right.ok
    assert not wrong.ok
    assert wrong.first is not None


@pytest.mark.grid(
    Grid({"name": ("lamb", "muon"), "plan": ("dp=2 sync=local every=2", "dp=2 tp=2 sync=diloco every=2")}, strength=1)
)
def test_replicas_that_differ_keep_norms_and_matrices_of_their_own(name: str, plan: str) -> None:
    model = functools.partial(build, tied=True)
    assert verify(model, next_token_loss, batches(), plan, **TRAININGS[name]).ok


def test_state_is_loaded_under_another_plan(tmp_path: Any) -> None:
    training = TRAININGS["muon"]

    def train(world: World, *, plan: str, begin: int, end: int) -> Any:
        model = functools.partial(build, tied=False)
        trainer = parallelize(model, plan, loss=next_token_loss, world=world, **training)
        if begin:
            trainer.load(tmp_path / "saved")
        steps = outcome(trainer, batches=batches()[begin:end])
        if not begin:
            trainer.save(tmp_path / "saved")
        return steps

    run(3, functools.partial(train, plan="dp=3 zero=3", begin=0, end=2))
    later = run(4, functools.partial(train, plan="dp=2 tp=2 zero=1", begin=2, end=3))
    agree(later[0], expected("muon", tied=False)[2:], bound=1e-9)
    other = parallelize(functools.partial(build, tied=False), "dp=1", loss=next_token_loss, **TRAININGS["sgd and lamb"])
    with pytest.raises(ValueError, match="saved with the optimizer Muon and AdamW, but this one is LAMB and SGD; use"):
        other.load(tmp_path / "saved")


@pytest.mark.parametrize("schedule", ["OneCycleLR", "CosineAnnealingLR", "ReduceLROnPlateau"])
def test_any_schedule_of_torch_sets_the_rates_of_a_trainer(schedule: str) -> None:
    def rates(optimizer: torch.optim.Optimizer, steps: Any) -> list[tuple[float, ...]]:
        arguments: dict[str, dict[str, Any]] = {
            "OneCycleLR": {"max_lr": 0.1, "total_steps": 5, "cycle_momentum": False},
            "CosineAnnealingLR": {"T_max": 5},
            "ReduceLROnPlateau": {"patience": 0},
        }
        schedules = getattr(torch.optim.lr_scheduler, schedule)(optimizer, **arguments[schedule])
        found = []
        for _ in range(3):
            steps()
            schedules.step(*([1.0] if schedule == "ReduceLROnPlateau" else []))
            found.append(tuple(sorted({group["lr"] for group in optimizer.param_groups})))
        return found

    def main(world: World) -> Any:
        model = functools.partial(build, tied=False)
        trainer = parallelize(model, "dp=2 zero=1", loss=next_token_loss, world=world, **TRAININGS["muon"])
        return rates(trainer.optimizer, lambda: trainer.step(batches()[0]))

    one = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.02, 0.01)])
    assert run(2, main)[0] == rates(one, lambda: one.step())  # noqa: PLW0108 - the schedule replaces `one.step`


@pytest.mark.parametrize(
    "training, message",
    [
        ({"optimizer": Muon}, r"Muon cannot update '.*' of shape \(.*\): it is no matrix.*optimizers="),
        ({"optimizer": Muon, "speed": 1}, "Muon takes no speed; it takes lr, weight_decay"),
        ({"optimizer": Muon, "adjust_lr_fn": "fast"}, "adjust_lr_fn='fast'; write one of original, match_rms_adamw"),
        ({"optimizer": LAMB, "lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"optimizer": Several, "optimizers": {"hidden": (Muon, {})}}, "has optimizer='rest', and there are hidden"),
    ],
)
def test_what_cannot_work_is_refused(training: dict[str, Any], message: str) -> None:
    model = functools.partial(build, tied=False)
    with pytest.raises(ValueError, match=message):
        parallelize(model, "dp=1", loss=next_token_loss, **training)


def test_options_by_pattern_and_depth() -> None:
    rule = parameter_rule(
        build(tied=True),
        groups={"*.bias": {"lr": 0.5}, "blocks.1.*": {"weight_decay": 0.3}, "head.*": {"weight_decay": 0.7}},
        several=True,
        lr={"hidden": 1.0, "rest": 2.0},
        layer_decay=0.5,
    )
    one = torch.zeros(1)
    assert rule("blocks.1.mlp.expansion.weight", one) == {"optimizer": "hidden", "weight_decay": 0.3, "lr": 0.5}
    assert rule("blocks.0.mlp.expansion.bias", one) == {"optimizer": "rest", "weight_decay": 0.0, "lr": 0.125}
    assert rule("norm.weight", one) == {"optimizer": "rest", "weight_decay": 0.0, "lr": 2.0}
    assert rule("embedding.weight", one) == rule("head.weight", one)
    assert rule("head.weight", one) == {"optimizer": "rest", "weight_decay": 0.7, "lr": 0.25}
    with pytest.raises(ValueError, match=r"no parameter matches the pattern 'blcks\.\*'; near names: blocks"):
        parameter_rule(build(tied=True), groups={"blcks.*": {}})


def test_options_by_pattern_agree_under_a_plan() -> None:
    options = functools.partial(Options, parameter_options=parameter_rule(build(tied=True), groups=GROUPS))
    single = alone(
        functools.partial(build, tied=True), loss=next_token_loss, batches=batches(), options=options(), lr=0.01
    )
    for rank in trained("dp=2 zero=1", tied=True, options=options(), lr=0.01):
        agree(rank, single, bound=1e-9)


GROUPS: dict[str, dict[str, Any]] = {"*.bias": {"lr": 0.05}, "blocks.*.weight": {"betas": (0.8, 0.9)}}
