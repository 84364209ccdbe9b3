"""Test 1-bit Adam, 1-bit LAMB and 0/1 Adam: each keeps its contract over ranks, ZeRO stages, axes and checkpoints.

exact      in the warm-up, and for ever with `codec="none"`, a plan gives the numbers of one process; they are AdamW's
replay     after it, the published algorithm over R replicas in one process gives every parameter to 1e-9
invariant  what is sent and the errors of all ranks add up to the true momenta, also across a change of plan"""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid, ranks_of
from last_outcome import alone, outcome
from meshwise import Plan, PlanError
from meshwise.comm.api.world import World
from meshwise.data_parallel.gradient_reduction import CODECS
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.model.whole_parameters import LogicalTensors
from meshwise.optim import LAMB, OneBitAdam, OneBitLAMB, Several, ZeroOneAdam
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_tape import TapeCall
from meshwise.testing import agree, count, run
from meshwise.verify import verify

KINDS: dict[str, Any] = {"adam": OneBitAdam, "lamb": OneBitLAMB, "zero one": ZeroOneAdam}
BOUND, LR = 1e-9, 0.02
EQUAL = Options(parameter_options=lambda _name, _parameter: {}, clip_norm=3.0)


# ---- exact -------------------------------------------------------------------------------------------------------


def gpt(*, tied: bool = False) -> GPT:
    shape = GPTConfig(vocabulary=16, context=4, layers=2, heads=4, width=12, mlp_ratio=2, bias=True, tied=tied)
    return GPT(shape).double()


def tokens(*rows: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(16, (each, 5), generator=generator) for each in rows]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in drawn]


ROWS = (6, 5, 4, 6, 7)


@functools.cache
def expected(kind: str, warmup: int) -> Any:
    arguments = {"optimizer": KINDS[kind], "lr": LR, "weight_decay": 0.1, "warmup": warmup, "codec": "none"}
    return alone(gpt, loss=next_token_loss, batches=tokens(*ROWS), **arguments)


def made(world: World, plan: str, **training: Any) -> Trainer:
    options = Options(example=tokens(6)[0])
    arguments: Any = {"lr": LR, "weight_decay": 0.1, "options": options} | training
    return parallelize(gpt, plan, loss=next_token_loss, world=world, **arguments)


SHAPES = ("", "tp=2", "tp=3", "tp=4 tp_mode=2d", "pp=2 microbatches=2", "pp=2 tp=2 microbatches=2", "cp=2")
EXACT = Grid(
    {"kind": tuple(KINDS), "shape": SHAPES, "dp": (1, 2, 3), "zero": (0, 1), "codec": ("none", "1bit")},
    cost=lambda cell: ranks_of(f"{cell['shape']} dp={cell['dp']}") * (8 if cell["dp"] == 1 else 1),
    exists=lambda cell: ranks_of(f"{cell['shape']} dp={cell['dp']}") <= 8,
    # Slices of a grid are encoded as slices of one dimension are.
    heavy=lambda cell: ranks_of(f"{cell['shape']} dp={cell['dp']}") > 6 or "2d" in cell["shape"],
    single=("shape", "dp"),
)


@pytest.mark.grid(EXACT)
def test_the_warm_up_and_what_loses_nothing_are_one_process(
    kind: str, shape: str, dp: int, zero: int, codec: str
) -> None:
    warmup = 5 if codec == "1bit" else 2

    def main(world: World) -> Any:
        trainer = made(world, f"{shape} dp={dp} zero={zero}", optimizer=KINDS[kind], warmup=warmup, codec=codec)
        return outcome(trainer, batches=tokens(*ROWS))

    for found in run(Plan.parse(f"{shape} dp={dp}").mesh().size, main):
        agree(found, expected(kind, warmup), bound=BOUND)


def test_without_a_codec_too_the_variance_stays_after_the_warm_up() -> None:
    p = nn.Parameter(torch.ones(2, 3))
    optimizer = OneBitAdam([p], logical=LogicalTensors({"p": p}), lr=LR, warmup=1, codec="none")
    variances = []
    for gradient in (1.0, 2.0):
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
        variances.append(optimizer.state[p]["exp_avg_sq"].clone())
    assert variances[1].equal(variances[0])


@pytest.mark.parametrize("kind, exact", [(OneBitAdam, torch.optim.AdamW), (OneBitLAMB, LAMB)])
def test_the_warm_up_is_adamw_or_lamb(kind: Any, exact: Any) -> None:
    ours, theirs = (
        alone(gpt, loss=next_token_loss, batches=tokens(*ROWS), optimizer=one, lr=LR, weight_decay=0.1)
        for one in (kind, exact)
    )
    agree(ours, theirs, bound=BOUND)


# ---- replay: one layer of one bucket -------------------------------------------------------------------------------


def layer() -> nn.Module:
    """A matrix and a vector of uneven sizes, in one bucket."""
    torch.manual_seed(3)
    return nn.Linear(19, 37).double()


def square_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), len(output)


def rows(step: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Rows of which the first inputs are always 0, so that some variances are."""
    generator = torch.Generator().manual_seed(step)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    x = draw(2 * ranks + step % 2, 19)
    x[:, :3] = 0
    return x, draw(2 * ranks + step % 2, 37)


def flat(values: Any, size: int) -> Tensor:
    joined = torch.cat([value.detach().reshape(-1) for value in values])
    return nn.functional.pad(joined, (0, size - len(joined)))


def gradient_of(module: nn.Module, batch: tuple[Tensor, Tensor], size: int) -> Tensor:
    module.zero_grad()
    square_loss(module(batch[0]), batch)[0].backward()
    return flat([p.grad for p in module.parameters()], size)


def coded(values: Tensor, *, codec: str, shard: int, used: int) -> Tensor:
    """What a codec makes of each shard of `values`; elements from `used` on are padding."""
    name, _, number = codec.partition(":")
    coder, shards = CODECS[name](float(number or 0)), values.view(-1, shard)
    found = coder.decode(coder.encode(shards), elements=shard, dtype=values.dtype).view(values.shape)
    found[..., used:] = 0
    return found


def replay(kind: str, ranks: int, *, codec: str, exact: tuple[int, ...], steps: int) -> dict[str, Tensor]:
    """Train by the published algorithm, in one process. `exact`: the steps with summed gradients, from 1 on."""
    module, (beta1, beta2), eps, decay = layer(), (0.9, 0.999), 1e-6 if kind == "lamb" else 1e-8, 0.1
    used, parts = 37 * 19 + 37, (37 * 19, 37)
    size = -(-used // (16 * ranks)) * 16 * ranks
    mean, square, fresh, owners = (torch.zeros(size, dtype=torch.float64) for _ in range(4))
    errors = torch.zeros(ranks, size, dtype=torch.float64)
    through = functools.partial(coded, codec=codec, shard=size // ranks, used=used)
    average, last = 0.0, 1.0  # of LAMB's ratios of the matrix

    for step in range(1, steps + 1):
        x, y = rows(step, ranks)
        parts_of_x = zip(x.tensor_split(ranks), y.tensor_split(ranks), strict=True)
        gradients = torch.stack([gradient_of(module, part, size) / len(x) for part in parts_of_x])
        done = sum(1 for one in exact if one <= step)
        square_norm = gradients.sum(0).square().sum() if step in exact else ranks * gradients.square().sum()
        norm = math.sqrt(float(square_norm))
        gradients *= min(1.0, 3.0 / (norm + 1e-6))
        before = mean
        if step in exact:
            gradient = gradients.sum(0)
            mean = beta1 * mean + (1 - beta1) * gradient
            square = beta2 * square + (1 - beta2) * gradient**2
            fresh = square
        else:
            wanted = beta1 * mean / ranks + (1 - beta1) * gradients + errors if ranks > 1 else None
            if wanted is None:
                mean = beta1 * mean + (1 - beta1) * gradients[0]
            else:
                sent = through(wanted)
                errors = wanted - sent
                due = sent.sum(0) + owners
                mean = through(due)
                owners = due - mean
            fresh = beta2 * fresh + (1 - beta2) * ((mean - beta1 * before) / (1 - beta1)) ** 2
        denominator = (square / (1 - beta2**done)).sqrt() + eps
        update = mean / (1 - beta1**step) / denominator
        if done < step:
            update = update.clamp(-1, 1)
            update[square == 0] = 0
        with torch.no_grad():
            weights = flat(module.parameters(), size)
            update += decay * weights
            if kind == "lamb":
                matrix = slice(0, parts[0])
                if step in exact:
                    ratio = float(weights[matrix].norm() / update[matrix].norm())
                    average = 0.9 * average + 0.1 * ratio
                else:
                    growth = denominator / ((fresh / (1 - beta2**step)).sqrt() + eps)
                    factor = min(max(float(growth[matrix][square[matrix] > 0].max()), 0.5), 4.0)
                    last = min(max(factor, 0.9 * last), 1.1 * last)
                    ratio = average / (1 - 0.9**done) * last
                update[matrix] *= ratio
            for p, change in zip(module.parameters(), update[:used].split(parts), strict=True):
                p.sub_(LR * change.view_as(p))
    return {name: p.detach() for name, p in module.named_parameters()}


EXACT_STEPS = {"adam": (1, 2, 3), "lamb": (1, 2, 3), "zero one": (1, 2, 3, 5, 7)}
ARGUMENTS: dict[str, dict[str, int]] = {"adam": {"warmup": 3}, "lamb": {"warmup": 3}, "zero one": {"kappa": 2}}
REPLAYS = Grid(
    {"kind": tuple(KINDS), "codec": ("1bit", "int8", "topk:0.1"), "ranks": (1, 2, 3, 4), "zero": (0, 1)},
    cost=lambda cell: cell["ranks"],
    single=("ranks",),
)


def trained(world: World, kind: str, *, codec: str, zero: int, first: int, last: int, **folders: Path) -> Trainer:
    """Train the layer with the steps `first` to `last`, from the checkpoint `load` to the checkpoint `save`."""
    arguments: Any = {"optimizer": KINDS[kind], "lr": LR, "weight_decay": 0.1, "codec": codec, **ARGUMENTS[kind]}
    plan = f"dp={world.size} zero={zero}"
    trainer = parallelize(layer(), plan, loss=square_loss, world=world, options=EQUAL, **arguments)
    if "load" in folders:
        trainer.load(folders["load"])
    for step in range(first, last + 1):
        trainer.step(rows(step, world.size))
    if "save" in folders:
        trainer.save(folders["save"])
    return trainer


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.full_parameters()}


@pytest.mark.grid(REPLAYS)
def test_training_equals_the_algorithm_in_plain_lines(kind: str, codec: str, ranks: int, zero: int) -> None:
    def main(world: World) -> dict[str, Tensor]:
        return parameters(trained(world, kind, codec=codec, zero=zero, first=1, last=8))

    wanted = replay(kind, ranks, codec=codec, exact=EXACT_STEPS[kind], steps=8)
    for found in run(ranks, main):
        agree(found, wanted, bound=BOUND)


# ---- checkpoints, and the invariant across them ---------------------------------------------------------------------


def errors(trainer: Trainer) -> dict[str, Tensor]:
    """The errors of all ranks, added up."""
    return {
        piece.row.name: whole[piece.start : piece.stop].clone()
        for unit in trainer.units
        for bucket in unit.buckets
        for whole in [bucket.gathered_from(bucket.summed_state("error"))]
        for piece in bucket.place.pieces
    }


def momenta(trainer: Trainer) -> dict[str, Tensor]:
    """The momentum of each parameter."""
    found: dict[str, Tensor] = {}
    for unit in trainer.units:
        for bucket in unit.buckets:
            own = torch.cat([trainer.optimizer.state[p]["exp_avg"] for _, p in bucket.slices])
            whole = bucket.gathered_from(own)
            found |= {piece.row.name: whole[piece.start : piece.stop].clone() for piece in bucket.place.pieces}
    return found


CHANGES = (((2, 0), (3, 1)), ((3, 1), (2, 0)), ((2, 1), (4, 1)), ((3, 0), (1, 0)))
"""Replicas and ZeRO stage before and after."""


@pytest.mark.grid(Grid({"kind": tuple(KINDS), "change": CHANGES}, strength=1))
def test_a_checkpoint_keeps_the_state_and_the_sum_of_the_errors(
    kind: str, change: tuple[tuple[int, int], tuple[int, int]], tmp_path: Path
) -> None:
    """The step after the load sends beta m + (1 - beta) g + the errors, and keeps what is lost."""
    before, after = change
    exact = EXACT_STEPS[kind][-1]

    def first(world: World) -> Any:
        trainer = trained(world, kind, codec="1bit", zero=before[1], first=1, last=exact + 2, save=tmp_path / "saved")
        return parameters(trainer), momenta(trainer), errors(trainer)

    def second(world: World) -> Any:
        trainer = trained(world, kind, codec="1bit", zero=after[1], first=1, last=0, load=tmp_path / "saved")
        loaded = parameters(trainer), momenta(trainer), errors(trainer)
        assert trainer.optimizer.param_groups[0]["step"] == exact + 2
        batch = rows(exact + 3, 2)
        module = layer()
        for name, value in loaded[0].items():
            module.get_parameter(name).data.copy_(value.view(module.get_parameter(name).shape))
        square_loss(module(batch[0]), batch)[0].backward()
        norm = trainer.step(batch).grad_norm
        factor = min(1.0, 3.0 / (norm + 1e-6)) / len(batch[0])
        for name, momentum in momenta(trainer).items():
            gradient = module.get_parameter(name).grad
            assert gradient is not None
            wanted = 0.9 * loaded[1][name] + 0.1 * factor * gradient.view(-1) + loaded[2][name]
            torch.testing.assert_close(momentum + errors(trainer)[name], wanted, rtol=1e-9, atol=1e-12)
        return loaded

    kept = run(before[0], first)[0]
    for found in run(after[0], second) if after[0] > 1 else ():
        for ours, theirs in zip(found, kept, strict=True):
            agree(ours, theirs, bound=BOUND)
    assert all(float(error.abs().max()) > 0 for error in kept[2].values())
    if after[0] == 1:  # one rank loses nothing and keeps what was lost
        one = run(
            1, functools.partial(trained, kind=kind, codec="1bit", zero=0, first=1, last=0, load=tmp_path / "saved")
        )
        agree(errors(one[0]), kept[2], bound=BOUND)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", [0, 1])
def test_a_resume_with_the_same_codec_off_is_the_same_training(kind: str, zero: int, tmp_path: Path) -> None:
    folder = tmp_path / "saved"

    def broken(world: World, ranks: int) -> dict[str, Tensor]:
        if ranks == 2:
            return parameters(trained(world, kind, codec="none", zero=zero, first=1, last=5, save=folder))
        return parameters(trained(world, kind, codec="none", zero=1 - zero, first=6, last=8, load=folder))

    def straight(world: World) -> dict[str, Tensor]:
        return parameters(trained(world, kind, codec="none", zero=zero, first=1, last=8))

    # both feed the rows of two ranks
    wanted = run(2, straight)[0]
    run(2, broken, args=(2,))
    for found in run(2, broken, args=(0,)):
        agree(found, wanted, bound=BOUND)


# ---- other axes after the warm-up, precision, skipped and open steps ------------------------------------------------


AFTER = Grid(
    {
        "kind": tuple(KINDS),
        "shape": ("dp=2 tp=2", "dp=2 pp=2 microbatches=2", "dp=2 tp=2 zero=1 microbatches=2", "dp=2 cp=2"),
    },
    strength=1,
    heavy=lambda cell: cell["shape"] == "dp=2 tp=2",  # as with ZeRO 1 and micro-batches
)


@functools.cache
def without_codec(kind: str) -> dict[str, Tensor]:
    arguments: dict[str, Any] = {"warmup": 3} if kind != "zero one" else {"kappa": 1}
    training = {"optimizer": KINDS[kind], "lr": LR, "weight_decay": 0.1, "codec": "none", **arguments}
    *_, last = alone(gpt, loss=next_token_loss, batches=tokens(*ROWS, 6, 5), **training)
    found: dict[str, Tensor] = last["parameters"]
    return found


@pytest.mark.grid(AFTER)
def test_after_the_warm_up_the_ranks_still_agree(kind: str, shape: str) -> None:
    """Every rank returns the same full parameters, near those without a codec."""

    def main(world: World) -> dict[str, Tensor]:
        arguments = {"warmup": 3} if kind != "zero one" else {"kappa": 1}
        trainer = made(world, shape, optimizer=KINDS[kind], codec="1bit", **arguments)
        for batch in tokens(*ROWS, 6, 5):
            trainer.step(batch)
        bits = [each.clone() for module in trainer.modules for each in module.parameters()]
        replicas = trainer.world.exchange(bits, axes="dp")
        assert all(torch.equal(one, other) for found in replicas for one, other in zip(found, bits, strict=True))
        return parameters(trainer)

    coded, plain = run(Plan.parse(shape).mesh().size, main), without_codec(kind)
    for found in coded:
        agree(found, coded[0], bound=0.0)
    apart = max(float((coded[0][name] - value).abs().max()) for name, value in plain.items())
    assert 1e-6 < apart < 0.5


def test_fp16_scales_no_error_and_a_skipped_step_changes_nothing() -> None:
    """Messages are divided by the loss scale, so a scale that changes between steps loses nothing."""

    def main(world: World) -> tuple[list[float], bool]:
        options = Options(parameter_options=lambda _name, _parameter: {}, nonfinite="skip:1")
        trainer = parallelize(
            layer().float(), "dp=2 precision=fp16", loss=square_loss, world=world, optimizer=OneBitAdam, warmup=2,
            lr=0.01, options=options,
        )  # fmt: skip
        losses = [trainer.step(tuple(each.float() for each in rows(0, 2))).loss for _ in range(30)]
        before = momenta(trainer)
        x, y = (each.float() for each in rows(0, 2))
        skipped = trainer.step((x * float("inf"), y)).skipped
        agree(momenta(trainer), before, bound=0.0)
        return losses, skipped

    for losses, skipped in run(2, main):
        assert skipped
        assert losses[-1] < 0.8 * losses[0]


def test_full_gradients_are_summed_when_asked_and_open_steps_update() -> None:
    def main(world: World, plan: str, codec: str) -> list[dict[str, Tensor]]:
        trainer = made(world, plan, optimizer=OneBitAdam, warmup=1, codec=codec)
        trainer.step(tokens(6)[0])
        trainer.step(tokens(6)[0])
        found = [{name: value.clone() for name, value in trainer.full_gradients()}]
        with trainer.open_step() as step:
            step.backward(step.loss(tokens(6)[0]))
            step.clip(0.5)
            if codec == "1bit":
                with pytest.raises(PlanError, match=r"step\.gradients needs summed gradients, but the optimizer"):
                    next(step.gradients())
            step.update()
        return [*found, parameters(trainer)]

    coded, whole = run(2, main, args=("dp=2 zero=1", "1bit")), run(1, main, args=("dp=1", "none"))[0]
    for found in coded:
        agree(found[0], whole[0], bound=0.1)
        agree(found[1], coded[0][1], bound=0.0)


def test_verify_leaves_the_codec_out_and_says_so() -> None:
    report = verify(gpt, next_token_loss, tokens(*ROWS), "dp=2 zero=1", optimizer=OneBitAdam, lr=LR, warmup=2)
    assert report.ok
    assert "OneBitAdam was compared with codec='none'" in str(report)


# ---- bytes ---------------------------------------------------------------------------------------------------------


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 128))


@pytest.mark.parametrize("zero", [0, 1])
def test_packed_bytes_travel(zero: int) -> None:
    """P elements in blocks of 256: P / 8 + 4 P / 256 bytes in the all-to-all and in the all-gather."""

    def main(world: World) -> list[dict[str, tuple[int, int]]]:
        plan = f"dp=4 zero={zero}"
        trainer = parallelize(
            wide(), plan, loss=square_loss, world=world, optimizer=OneBitAdam, warmup=1, options=EQUAL
        )
        found = []
        for _ in range(3):
            with world.record() as records:
                trainer.step((torch.ones(4, 256), torch.ones(4, 128)))
            found.append(dict(count(records)))
        return found

    warm, first, steady = run(4, main)[0]
    elements = 256 * 512 + 512 + 512 * 128 + 128
    # the shards of both layers are multiples of 16 elements, and their last blocks may be short
    packed = sum(
        4 * (shard // 8 + 4 * math.ceil(shard / 256)) for shard in ((256 * 512 + 512) // 4, (512 * 128 + 128) // 4)
    )
    gathered = 4 * elements * zero  # the parameters, which ranks of one host may share
    assert warm["all_reduce[dp]" if not zero else "reduce_scatter[dp]"][1] - 32 * (not zero) == 4 * elements
    assert steady["all_to_all[dp]"][1] == packed
    assert steady["all_gather[dp]"][1] == packed + gathered
    assert steady["all_reduce[dp]"][1] == 32
    assert first["all_gather[dp]"][1] == steady["all_gather[dp]"][1] + gathered  # zero=1 gathers the momentum once
    assert 4 * elements / packed > 28


def test_the_simulator_prices_the_steps_after_the_warm_up() -> None:
    batch = (torch.ones(4, 256), torch.ones(4, 128))
    subject = RehearsalSubject(wide, square_loss, batch, OneBitAdam, {"lr": 1e-3})
    tape = rehearse(subject, plan="dp=4", ranks=4).tapes[0]
    calls = [entry.record for segment in tape.steady for entry in segment.entries if isinstance(entry, TapeCall)]
    kinds = {record.kind for record in calls if record.bytes > 32}
    assert kinds == {"all_to_all", "all_gather"}


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan, nearest",
    [
        ("dp=2 zero=2", "'dp=2 zero=1'"),
        ("dp=2 zero=3", "'dp=2 zero=1'"),
        ("dp=2 wire=1bit", "'dp=2'"),
        ("dp=2x2 zero=1", "'dp=4 zero=1'"),
        ("dp=2 sync=local every=4", "'dp=2'"),
    ],
)
def test_plans_are_refused_with_the_nearest_that_works(plan: str, nearest: str) -> None:
    def main(world: World) -> None:
        with pytest.raises(PlanError, match=f"cannot work with OneBitAdam: .* Nearest that works: {nearest}"):
            made(world, plan, optimizer=OneBitAdam)
        made(world, nearest.strip("'"), optimizer=OneBitAdam)

    run(Plan.parse(plan).mesh().size, main)


@pytest.mark.parametrize(
    "training, message",
    [
        ({"codec": "powersgd:4"}, "codec='powersgd:4' does not encode momenta; write codec='1bit'"),
        ({"codec": "bf16"}, "codec='bf16' does not encode momenta"),
        ({"codec": 1}, "codec=1 does not encode momenta; write codec='1bit'"),
        ({"codec": "2bit"}, "wire=2bit: wire is .* Nearest that works"),
        ({"warmup": 0}, "warmup=0 is no number of steps; write warmup=100"),
        ({"freeze": 3}, "OneBitAdam takes no freeze; it takes lr, betas"),
        ({"options": Options(noise=True)}, "OneBitAdam sums no gradients to measure their noise"),
        (
            {"optimizer": Several, "optimizers": {"hidden": (OneBitAdam, {}), "rest": (LAMB, {})}},
            "OneBitAdam keeps gradients of replicas apart",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused(training: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"optimizer": OneBitAdam, "loss": next_token_loss} | training
    with pytest.raises(ValueError, match=message):
        parallelize(gpt, "dp=1 microbatches=2", **arguments)


def test_weights_that_several_stages_hold_are_refused() -> None:
    def main(world: World) -> None:
        options = Options(example=tokens(6)[0])
        model = functools.partial(gpt, tied=True)
        with pytest.raises(
            PlanError, match=r"OneBitAdam would let copies of embedding\.weight in two stages differ; use pp=1"
        ):
            parallelize(
                model, "pp=2 microbatches=2", loss=next_token_loss, world=world, optimizer=OneBitAdam, options=options
            )

    run(2, main)
