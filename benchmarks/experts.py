"""Steps of a mixture of experts on four processes: its experts divided, beside other plans and beside transformers.

    python benchmarks/experts.py --rounds 15
    python benchmarks/experts.py --memory     # activations that a rank keeps, with and without chunk=
    python benchmarks/experts.py --exchange   # all-to-alls of tokens in a step, beside equal ones by themselves
    python benchmarks/experts.py --parts "1Gbit 1ms"   # overlapped exchanges, on an emulated link and without it
    python benchmarks/experts.py --contestants   # the reference GPT, beside mixtures of Megatron-Core and DeepSpeed
    python benchmarks/experts.py --skewed     # replicate=, with a router whose first choice is always the same expert

Two models with 4 blocks of 16 experts, top-2, in fp32: the reference GPT, and Mixtral of transformers. Mixtral also
runs by transformers' own expert parallelism (`DistributedConfig(fsdp_size=4, ep_size=4)`, all-to-all over gloo) and its
own FSDP2. All contestants of a model run in one set of processes, in turns of one step, in alternating order. The time
of a step is that of the slowest rank, from a barrier on. A ratio is the median over the turns, with quartiles. Bytes of
parameters are those of rank 0. The last three measurements take two processes, one for each core of a small machine:
with more, a rank waits for a core, and that wait would count."""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers.distributed.configuration_utils import DistributedConfig

import meshwise as mw
from expert_contestants import CONTESTANTS
from meshwise.comm.api.world import EmulatedLink
from meshwise.reference import MixtureConfig, MixtureGPT, next_token_loss
from meshwise.testing import SavedForBackward, run
from peer_table import machine

PLANS = (
    "dp=4 ep=4", "dp=4 ep=2", "dp=4", "dp=4 zero=1 ep=4", "dp=4 zero=3", "dp=4 zero=3 ep=4",
    "dp=4 ep=4 dispatch=all-gather", "dp=4 ep=4 chunk=128",
)  # fmt: skip
SHAPE = MixtureConfig(layers=4, width=128, heads=4, vocabulary=256, context=128, experts=16, choices=2)
MIXTRAL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "num_local_experts": 16, "num_experts_per_tok": 2,
}  # fmt: skip
OF_MIXTRAL = ("dp=4 ep=4", "dp=4 zero=3 ep=4", "dp=4 zero=3")
PEERS = {"transformers, fsdp_size=4 ep_size=4": 4, "transformers, fsdp_size=4": 1}
"""Contestants with transformers' own parallelism, and their `ep_size`."""
ROWS, RANKS, PAIR, REPEATS = 16, 4, 2, 4
EXCHANGED = ((ROWS, SHAPE), (4 * ROWS, replace(SHAPE, layers=1, width=512)))
"""Rows and models whose all-to-alls are measured: about 1 MB and 17 MB given by a rank in each call."""
COLD_BYTES, QUARTILES = 64 << 20, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
PARTS = (
    "dp=2 ep=2", "dp=2 ep=2 dispatch_parts=2", "dp=2 ep=2 dispatch_parts=4",
    "dp=2 ep=2 microbatches=4", "dp=2 ep=2 microbatches=4 overlap_microbatches=1",
)  # fmt: skip
SKEWED = ("dp=2 ep=2", "dp=2 ep=2 replicate=1")
Exchanged = tuple[tuple[float, float], tuple[float, float], list[torch.Size], list[torch.Size]]
"""An all-to-all in a step: the clocks before and after it, and the shapes of the given and the received parts."""
Found = dict[str, tuple[list[float], int]]
"""By contestant: seconds of its steps, and bytes of parameters on rank 0."""
Contestant = tuple[Callable[[], object], int]
"""Function that trains one step, and bytes of parameters on this rank."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", action="store_true", help="measure activations in place of times")
    parser.add_argument("--exchange", action="store_true", help="measure the all-to-alls of tokens alone")
    parser.add_argument("--parts", metavar="LINK", help="measure overlap of exchanges on an emulated link")
    parser.add_argument("--skewed", action="store_true", help="measure replicate= with a skewed router")
    parser.add_argument(
        "--contestants", action="store_true", help="measure Megatron-Core and DeepSpeed-MoE beside ours"
    )
    arguments = parser.parse_args()
    if arguments.exchange:
        print(mw.run(PAIR, exchange, args=(arguments.rounds,))[0])
        return
    if arguments.parts or arguments.skewed:
        print(mw.run(PAIR, variants, args=(arguments.parts, arguments.rounds))[0])
        return
    if arguments.memory:
        print(activations())
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.contestants:
            print(markdown("reference GPT", mw.run(RANKS, measure, args=(others, folder, arguments.rounds))[0]))
            return
        transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL)).save_pretrained(f"{folder}/model")
        for model, kind in (("reference GPT", reference), ("Mixtral", mixtral)):
            found = mw.run(RANKS, measure, args=(kind, folder, arguments.rounds))[0]
            print(markdown(model, found), flush=True)


def activations() -> str:
    """Return a table of the activations that the fullest rank keeps for the backward of the reference model."""
    tokens = torch.randint(0, 256, (RANKS * ROWS, SHAPE.context + 1), generator=torch.Generator().manual_seed(1))

    def kept(world: mw.World, plan: str) -> tuple[int, int]:
        trainer = mw.parallelize(lambda: MixtureGPT(SHAPE), plan, loss=next_token_loss, world=world, lr=1e-3)
        rows: list[int] = []
        for name, module in trainer.model.named_modules():
            if name.endswith("experts"):
                module.register_forward_hook(lambda each, *_: rows.append(each.sharding.exchange.received))
        with SavedForBackward(trainer.model) as saved:
            trainer.step((tokens[:, :-1], tokens[:, 1:]))
        return saved.bytes, max(rows)

    lines = [
        f"| reference model, {ROWS} x {SHAPE.context} tokens of a rank | kept, MB | rows at once |",
        "|---|--:|--:|",
    ]
    for plan in ("dp=4 ep=4", "dp=4 ep=4 chunk=512", "dp=4 ep=4 chunk=128"):
        found = run(RANKS, kept, args=(plan,))
        size, rows = (max(values) for values in zip(*found, strict=True))
        lines.append(f"| `{plan}` | {size / 1e6:.1f} | {rows:,} |")
    return "\n".join(lines)


def exchange(world: mw.World, rounds: int) -> str:
    """Return a table of the all-to-alls of tokens in a step, beside equal ones by themselves.

    In the step each begins at a barrier. Its tensors were just computed, and the computation has pushed code and data
    of the collective out of the caches. So equal calls by themselves run in two settings:

    | caches cold   one call from a barrier on, after the rank has written `COLD_BYTES` of other memory
    | caches warm   `REPEATS` calls back to back with the same buffers, after an untimed one, as in `meshwise bench`

    The time of a call is the shortest of the ranks: the rank that arrives last waits for no other. CPU seconds leave
    out the time in which other processes had the core."""
    torch.set_num_threads(1)
    lines = ["| all-to-alls of tokens | ms | step / these (quartiles) | CPU, ms | step / these (quartiles) |"]
    lines.append("|---|--:|---|--:|---|")
    for rows, shape in EXCHANGED:
        found = torch.stack([exchanged(*turn) for turn in steps_with_exchanges(world, rows, shape, rounds)])
        for setting, name in enumerate((f"a step, {shape.width} features", "caches cold", "caches warm")):
            cells = [name]
            for clock in range(2):
                times = found[:, setting, clock]
                low, middle, high = (found[:, 0, clock] / times).quantile(QUARTILES).tolist()
                cells.append(f"{times.median() * 1e3:.2f} | {middle:.2f} ({low:.2f}-{high:.2f})")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"- Machine: {machine()}; one thread a rank, {rounds} turns."])


def clocks() -> tuple[float, float]:
    """Return the wall time and the CPU time of this thread, in seconds."""
    return time.perf_counter(), time.thread_time()


def steps_with_exchanges(
    world: mw.World, rows: int, shape: MixtureConfig, rounds: int
) -> Iterator[tuple[mw.World, list[Exchanged]]]:
    """Train steps, each with other tokens, so that the sizes of the all-to-alls change as in training.

    Return for each step, after two untimed ones, the trainer's world and the all-to-alls of the step."""
    draws = torch.Generator().manual_seed(1)
    trainer = mw.parallelize(lambda: MixtureGPT(shape), PARTS[0], loss=next_token_loss, world=world, lr=1e-3)
    original, calls = mw.World.all_to_all, list[Exchanged]()

    def timed(self: mw.World, x: Any, *, into: Any, axes: Any) -> Any:
        if not x[0].is_floating_point():
            return original(self, x, into=into, axes=axes)
        world.barrier()
        start = clocks()
        work = original(self, x, into=into, axes=axes)
        work.wait()
        calls.append((start, clocks(), [each.shape for each in x], [each.shape for each in into]))
        return work

    for turn in range(rounds + 2):
        calls.clear()
        tokens = torch.randint(0, 256, (rows, shape.context + 1), generator=draws)
        mw.World.all_to_all = timed  # type: ignore[method-assign]
        trainer.step((tokens[:, :-1], tokens[:, 1:]))
        mw.World.all_to_all = original  # type: ignore[method-assign]
        if turn > 1:
            yield trainer.world, calls


def exchanged(world: mw.World, calls: list[Exchanged]) -> Tensor:
    """Return the seconds of all calls, (settings, clocks): in the step, alone with cold and with warm caches."""
    spans = [[(start, stop)] for start, stop, _, _ in calls]
    other = torch.zeros(COLD_BYTES // 4)
    for call, (_, _, *shapes) in zip(spans, calls, strict=True):
        for repeats in (1, REPEATS):
            given, taken = ([torch.ones(shape) for shape in each] for each in shapes)
            if repeats == 1:
                other.add_(1)
            else:
                world.all_to_all(given, into=taken, axes="dp").wait()
            world.barrier()
            start = clocks()
            for _ in range(repeats):
                world.all_to_all(given, into=taken, axes="dp").wait()
            call.append((start, clocks()))
    times = torch.tensor(spans, dtype=torch.float64).diff(dim=2).squeeze(2) / torch.tensor([[1], [1], [REPEATS]])
    return torch.stack(world.exchange(times)).amin(0).sum(0)


def variants(world: mw.World, link: str | None, rounds: int) -> str:
    """Return a table of the steps of the reference model: under `PARTS` on a link, or under `SKEWED` without one."""
    torch.set_num_threads(1)
    tokens = torch.randint(0, 256, (ROWS, 129), generator=torch.Generator().manual_seed(1))
    trainers: dict[str, mw.Trainer] = {}
    for plan in PARTS if link else SKEWED:
        for slow in ("", link) if link else ("",):
            world.link = EmulatedLink.parse(slow) if slow else None  # of the views that the trainer makes
            trainers[f"`{plan}`" + (f", {slow}" if slow else "")] = mw.parallelize(
                lambda: MixtureGPT(SHAPE), plan, loss=next_token_loss, world=world, lr=1e-3
            )
    world.link = None
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    rows: dict[str, int] = {}
    for trainer in trainers.values():
        for block in range(0 if link else SHAPE.layers):
            router = trainer.model.get_submodule(f"blocks.{block}.mlp.router")
            router.register_forward_hook(lambda _module, _given, output: (first_expert(output[0]), *output[1:]))
    for turn in range(-2, rounds):
        for name in list(trainers)[:: 1 if turn % 2 else -1]:
            world.barrier()
            started = time.perf_counter()
            trainers[name].step((tokens[:, :-1], tokens[:, 1:]))
            slowest = max(world.exchange(time.perf_counter() - started))
            if turn >= 0:
                seconds[name].append(slowest)
            experts: Any = trainers[name].model.get_submodule("blocks.0.mlp.experts")
            rows[name] = max(world.exchange(experts.sharding.exchange.received))
    first = next(iter(seconds.values()))
    lines = ["| plan | step, s | ratio to the first (quartiles) | rows of the fullest rank |", "|---|--:|---|--:|"]
    for name, times in seconds.items():
        low, middle, high = statistics.quantiles((one / other for one, other in zip(times, first, strict=True)), n=4)
        lines.append(
            f"| {name} | {statistics.median(times):.3f} | {middle:.2f} ({low:.2f}-{high:.2f}) | {rows[name]:,} |"
        )
    return "\n".join([*lines, "", f"- Machine: {machine()}; one thread a rank, {rounds} turns."])


def first_expert(index: Tensor) -> Tensor:
    """Return the choices (…, k) with the first expert as the first choice of every token."""
    return torch.cat([torch.zeros_like(index[..., :1]), index[..., 1:]], -1)


def measure(world: mw.World, kind: Callable[..., dict[str, Contestant]], folder: str, rounds: int) -> Found:
    """Run the steps of all contestants in turns, and return their times: those of the slowest rank."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    tokens = torch.randint(0, 256, (ROWS, 129), generator=torch.Generator().manual_seed(1))
    contestants = kind(world, (tokens[:, :-1], tokens[:, 1:]), folder)
    found: Found = {name: ([], size) for name, (_, size) in contestants.items()}
    for turn in range(-2, rounds):
        for name in list(contestants)[:: 1 if turn % 2 else -1]:
            world.barrier()
            started = time.perf_counter()
            contestants[name][0]()
            seconds = max(world.exchange(time.perf_counter() - started))
            if turn >= 0:
                found[name][0].append(seconds)
    return found


def reference(world: mw.World, batch: tuple[Tensor, Tensor], _folder: str) -> dict[str, Contestant]:
    """Return the plans of the reference model."""
    return {plan: planned(lambda: MixtureGPT(SHAPE), plan, world, batch, mw.Options()) for plan in PLANS}


def mixtral(world: mw.World, batch: tuple[Tensor, Tensor], folder: str) -> dict[str, Contestant]:
    """Return the plans of Mixtral, and transformers' own parallelism; all from the same parameters."""
    options = mw.Options(forward=lambda model, rows: model(rows[0], use_cache=False).logits)
    path = Path(folder, "model")
    found = {
        plan: planned(transformers.MixtralForCausalLM.from_pretrained(path), plan, world, batch, options)
        for plan in OF_MIXTRAL
    }
    rows = rows_over_gloo(world, batch, folder)
    return found | {name: peer(path, experts, rows) for name, experts in PEERS.items()}


def others(world: mw.World, batch: tuple[Tensor, Tensor], folder: str) -> dict[str, Contestant]:
    """Return our plan and the mixtures of other libraries in the reference model, all from the same parameters."""

    def model() -> MixtureGPT:
        torch.manual_seed(1)
        return MixtureGPT(SHAPE)

    found = {PLANS[0]: planned(model(), PLANS[0], world, batch, mw.Options())}
    rows = rows_over_gloo(world, batch, folder)
    for name, (package, build) in CONTESTANTS.items():
        if importlib.util.find_spec(package):
            found[name] = build(model(), SHAPE, rows)
        elif world.rank == 0:
            print(f"{name} is left out: there is no package {package} here")
    return found


def rows_over_gloo(world: mw.World, batch: tuple[Tensor, Tensor], folder: str) -> tuple[Tensor, Tensor]:
    """Open torch's process group over gloo, for other libraries, and return the rows of this rank."""
    os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.rank), "WORLD_SIZE": str(RANKS)}
    torch.distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=world.rank, world_size=RANKS)
    start, stop = (ROWS // RANKS * number for number in (world.rank, world.rank + 1))
    return batch[0][start:stop], batch[1][start:stop]


def planned(model: Any, plan: str, world: mw.World, batch: tuple[Tensor, Tensor], options: mw.Options) -> Contestant:
    """Return a step of meshwise."""
    trainer = mw.parallelize(model, plan, loss=next_token_loss, world=world, options=options, lr=1e-3)
    return lambda: trainer.step(batch), trainer.memory()["parameters"]


def peer(path: Path, experts: int, rows: tuple[Tensor, Tensor]) -> Contestant:
    """Return a step of transformers' own parallelism, with torch's AdamW; `rows`: those of this rank."""
    config = DistributedConfig(fsdp_size=RANKS, ep_size=experts)
    model: nn.Module = transformers.MixtralForCausalLM.from_pretrained(path, distributed_config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        logits = model(input_ids=rows[0], use_cache=False).logits
        functional.cross_entropy(logits.flatten(0, 1), rows[1].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    own = (each.to_local() if isinstance(each, DTensor) else each for each in model.parameters())
    return step, sum(each.numel() * each.itemsize for each in own)


def markdown(model: str, found: Found) -> str:
    """Return the table of a model."""
    names = list(found)
    first = found[names[0]][0]
    lines = [f"| {model}, four processes | step, s | ratio to the first (quartiles) | parameters of a rank, MB |"]
    lines.append("|---|--:|---|--:|")
    for name, (seconds, size) in found.items():
        ratios = [one / other for one, other in zip(seconds, first, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        lines.append(
            f"| {name} | {statistics.median(seconds):.3f} | {middle:.2f} ({low:.2f}-{high:.2f}) | {size / 1e6:.1f} |"
        )
    shape = f"{SHAPE.layers} blocks of {SHAPE.experts} experts, width {SHAPE.width}, {ROWS} x {SHAPE.context} tokens"
    notes = ["", f"- Machine: {machine()}; one thread a rank.", f"- {shape}, AdamW, {len(first)} turns.", ""]
    return "\n".join([*lines, *notes])


if __name__ == "__main__":
    main()
