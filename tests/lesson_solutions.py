"""Right answers to the exercises of the lessons, by the number of the lesson."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import meshwise as mw


def column(mine: Sequence[str], all_gather: Any) -> list[str]:
    return [row[all_gather.rank] for row in all_gather(mine)]


def last_arrival(ready: Sequence[float], send: float) -> float:
    free = 0.0
    for time in ready:
        free = max(free, time) + send
    return free


def warm_rate(step: int, warmup: int, base: float, batch: int, base_batch: int) -> float:
    return base * batch / base_batch * min(1.0, step / warmup)


def may_go_on(clocks: Sequence[int], s: int) -> list[int]:
    return [rank for rank, clock in enumerate(clocks) if clock - min(clocks) <= s]


def mixed_state(P: int, n: int, stage: int) -> float:
    split = {0: 0, 1: 12, 2: 14, 3: 16}[stage]
    return P * ((16 - split) + split / n)


def best_group(L: int, c: int) -> int:
    return min((k for k in range(1, L + 1) if L % k == 0), key=lambda k: L / k + k * c)


def next_scale(scale: float, good: int, finite: bool, patience: int) -> tuple[float, int]:
    if not finite:
        return scale / 2, 0
    return (scale * 2, 0) if good + 1 == patience else (scale, good + 1)


def summed_products(X: Sequence[Tensor], W: Sequence[Tensor]) -> Tensor:
    return torch.stack([x @ w for x, w in zip(X, W, strict=True)]).sum(0)


def layer_bytes(tokens: int, h: int, n: int, sequence_parallel: bool) -> float:
    return tokens * h * ((10 + 24) / n if sequence_parallel else 10 + 24 / n)


def kept_tokens(choices: Sequence[int], experts: int, capacity: float) -> list[bool]:
    most, taken = math.ceil(capacity * len(choices) / experts), [0] * experts
    kept = []
    for expert in choices:
        taken[expert] += 1
        kept.append(taken[expert] <= most)
    return kept


def gpipe_table(p: int, m: int) -> list[list[tuple[str, int]]]:
    return [[("F", i) for i in range(m)] + [("B", i) for i in range(m)] for _ in range(p)]


def group_along(rank: int, degrees: Sequence[int], axis: int) -> tuple[int, ...]:
    names = [chr(ord("a") + at) for at in range(len(degrees))]
    return mw.Mesh.of(**dict(zip(names, degrees, strict=True))).group(rank, axes=[names[axis]])


def lowest_stage(P: int, memory: int, n: int) -> int | None:
    bytes_of = {0: 16 * P, 1: 4 * P + 12 * P / n, 3: 16 * P / n}
    return next((stage for stage, needed in bytes_of.items() if needed <= memory), None)


def one_bit(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    total = x + error
    sent = total.sign() * total.abs().mean()
    return sent, total - sent


SOLUTIONS: Mapping[str, Callable[..., Any]] = {
    "01": lambda flops, rate, size, bandwidth: max(flops / rate, size / bandwidth),
    "02": column,
    "03": lambda S, n, N: 2 * (N - 1) / N * S / n,
    "04": lambda sums, rows: sum(sums) / sum(rows),
    "05": last_arrival,
    "06": warm_rate,
    "07": may_go_on,
    "08": mixed_state,
    "09": lambda P, _n, rate: 2 * 8 * P / rate,
    "10": best_group,
    "11": next_scale,
    "12": summed_products,
    "13": lambda T, K, N, q: (T * K / q + K * N / q) * (1 - 1 / q),
    "14": layer_bytes,
    "15": lambda rank, n: [rank, 2 * n - 1 - rank],
    "16": kept_tokens,
    "17": lambda p, m: (p - 1) / (m + p - 1),
    "18": gpipe_table,
    "19": group_along,
    "20": lowest_stage,
    "21": lambda save, hours, devices: (2 * save * hours * 3600 / devices) ** 0.5,
    "22": one_bit,
    "23": lambda P, tokens, devices, peak, used: 6 * P * tokens / (devices * peak * used) / 86400,
}
