"""Measure attention over split tokens beside one process: the fraction of ideal, and a window beside dense attention.

    python benchmarks/context.py --ranks 2 --tokens 2048 4096 8192
    python benchmarks/context.py --ranks 2 --tokens 8192 --contexts zigzag ulysses --peers

Each rank is a process on one core. In every round all ranks compute the whole attention, each by itself with torch's
scaled_dot_product_attention, and then together the same attention split by each `context`: forward and backward. The
fraction of ideal is the time of the whole, divided by ranks times the time split. The last column is the largest
difference of the outputs, relative to the largest output.

`--peers` adds the exchanges of other libraries, where they are installed: Ulysses of DeepSpeed and of
long-context-attention (yunchang), over gloo and with torch's attention, and yunchang's ring with its own kernel."""

import argparse
import importlib.metadata
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed
from torch.nn import functional

import meshwise as mw
from meshwise.attention import Pattern, attend, causal, window
from meshwise.attention.context_parallel import ContextParallel
from meshwise.model.random_draws import SampleRows
from meshwise.plan import Plan

FEATURES, WINDOW = 64, 1024


def backward_of(qkv: list[Tensor], run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Run an attention forward and backward; return its output."""
    for x in qkv:
        x.grad = None
    out = run(*qkv)
    out.backward(torch.ones_like(out))
    return out.detach()


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_token(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """Return torch's causal attention for tensors (batch, tokens, heads, features)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def deepspeed_ulysses() -> Attention:
    """Return DeepSpeed's exchange of tokens for heads."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.init_distributed("gloo")
    exchange = DistributedAttention(by_token, distributed.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: exchange(q, k, v, 0)


def yunchang_ulysses() -> Attention:
    """Return the exchange of tokens for heads of long-context-attention, with torch's attention as its kernel."""
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    exchange = UlyssesAttention(distributed.group.WORLD, attn_type=AttnType.TORCH_FLASH)
    exchange.attn_fn = by_token
    return lambda q, k, v: exchange(q, k, v, causal=True)


def yunchang_ring() -> Attention:
    """Return the ring of long-context-attention, if its kernel runs here: an error later would leave messages open."""
    from yunchang.kernels.attention import pytorch_attn_forward
    from yunchang.ring import ring_pytorch_attn_func

    pytorch_attn_forward(*(torch.zeros(1, 1, 1, FEATURES) for _ in range(3)))
    return lambda q, k, v: ring_pytorch_attn_func(q, k, v, causal=True, group=distributed.group.WORLD)


PEERS = {
    "deepspeed ulysses": deepspeed_ulysses,
    "yunchang ulysses": yunchang_ulysses,
    "yunchang ring": yunchang_ring,
}


def peers_here(world: mw.World, names: Sequence[str]) -> tuple[dict[str, Attention], list[str]]:
    """Return the attentions of other libraries that run here, and a line for each that does not."""
    meeting = "file://" + world.exchange(tempfile.mktemp())[0]  # torch makes the file
    distributed.init_process_group("gloo", meeting, rank=world.rank, world_size=world.size)
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.rank))
    found, missing = {}, []
    for name in names:
        package = name.split()[0]
        try:
            found[f"{name} {importlib.metadata.version(package)}"] = PEERS[name]()
        except ImportError:
            missing.append(f"{name}: not installed")
        except NotImplementedError as error:
            missing.append(f"{name}: {str(error).split('. ')[0]}")
    return found, missing


def timed(world: mw.World, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the seconds of the slowest rank, and the result on this rank."""
    world.barrier()
    start = time.perf_counter()
    result = run()
    return max(world.exchange(time.perf_counter() - start)), result


def measured(
    world: mw.World, tokens: int, contexts: list[str], rounds: int, heads: int, others: Sequence[str]
) -> list[str]:
    """Return the lines of the table for one number of tokens."""
    torch.set_num_threads(1)
    peers, missing = peers_here(world, others) if others else ({}, [])
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, tokens, FEATURES).requires_grad_() for _ in range(3)]
    plans = {name: Plan.parse(f"cp={world.size} context={name}") for name in contexts}
    patterns: dict[str, Pattern] = {name: causal() & window(WINDOW) if name == "window" else causal() for name in plans}
    splits = {name: ContextParallel(plan, world=world.over(plan.mesh())) for name, plan in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ("whole", "windowed", *plans, *peers)}
    errors = {}
    block = slice(world.rank * tokens // world.size, (world.rank + 1) * tokens // world.size)
    blocks = [x.detach()[:, :, block].transpose(1, 2).contiguous().requires_grad_() for x in whole]

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, pattern=causal() & window(WINDOW))

    for number in range(rounds + 1):
        spent, out = timed(world, lambda: backward_of(whole, dense))
        narrow, other = timed(world, lambda: backward_of(whole, windowed))
        found = {"whole": spent, "windowed": narrow}
        for name, context in splits.items():
            rows = SampleRows(0, 1)
            with context.mode.running(rows):
                context.on_own_tokens(lambda _model, _batch: None)(torch.nn.Identity(), torch.zeros(1, tokens))
                state = context.mode.state
                assert state is not None
                own = [state.own.take(x.detach(), dim=2).contiguous().requires_grad_() for x in whole]
                pattern = patterns[name]

                def split(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = pattern) -> Tensor:
                    return attend(q, k, v, pattern=pattern)

                found[name], mine = timed(world, lambda own=own, split=split: backward_of(own, split))  # type: ignore[misc]
            exact = state.own.take(other if name == "window" else out, dim=2)
            errors[name] = float((mine - exact).abs().max() / exact.abs().max())
        for name, peer in peers.items():
            found[name], mine = timed(world, lambda peer=peer: backward_of(blocks, peer))  # type: ignore[misc]
            exact = out[:, :, block].transpose(1, 2)
            errors[name] = float((mine - exact).abs().max() / exact.abs().max())
        if number:
            for name, value in found.items():
                seconds[name].append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    width = max(map(len, medians))
    lines = [f"{tokens:>7}  {name:<{width}} {medians[name]:8.3f} s" for name in ("whole", "windowed")]
    for name in (*splits, *peers):
        alone = medians["windowed" if name == "window" else "whole"]
        fraction = alone / (world.size * medians[name])
        lines.append(
            f"{tokens:>7}  {name:<{width}} {medians[name]:8.3f} s   {fraction:5.2f} of ideal   {errors[name]:.1e}"
        )
    return lines + [f"{'':>7}  {line}" for line in missing]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--contexts", nargs="*", default=["gather", "ring", "zigzag", "striped", "ulysses", "window"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--peers", action="store_const", const=tuple(PEERS), default=(), help="with other libraries")
    given = parser.parse_args()
    for tokens in given.tokens:
        sizes = (tokens, given.contexts, given.rounds, given.heads, given.peers)
        for line in mw.run(given.ranks, measured, args=sizes)[0]:
            print(line, flush=True)


if __name__ == "__main__":
    main()
