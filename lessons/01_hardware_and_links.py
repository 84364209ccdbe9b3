# %% [markdown]
# # 1. Hardware and links
#
# A device computes, and links carry numbers between devices. Each has a peak rate. Whichever is used up first sets the
# time of a step. This lesson computes both times for a matrix product, and finds when a link is the limit.
#
#     seconds to compute  =  flops / (flops per second)
#     seconds to send     =  latency + bytes / (bytes per second)
#
# Paper: Williams, Waterman and Patterson, *Roofline*, CACM 2009.

# %%
import time

import torch

from meshwise.simulate.cluster import load

h100 = load("h100")
links = {"inside a node": h100.inside, "between nodes": h100.between}
print(f"peak of a device in bf16: {h100.device.peak['bfloat16'] / 1e12:.0f} Tflop/s")
for name, link in links.items():
    print(f"a link {name}: {max(rate for _, rate in link.bandwidth) / 1e9:.0f} GB/s, {link.latency * 1e6:.0f} µs")

# %% [markdown]
# ## The same for this machine
#
# A product of two n x n matrices has 2 n³ flops. It is timed here.

# %%
n = 384
a, b = torch.randn(2, n, n).unbind()
a @ b
start = time.perf_counter()
for _ in range(10):
    a @ b
seconds = (time.perf_counter() - start) / 10
rate = 2 * n**3 / seconds
print(f"{n} x {n} in fp32: {seconds * 1e3:.2f} ms, {rate / 1e9:.1f} Gflop/s")
assert rate > 1e8, "slower than any processor of this century"

# %% [markdown]
# ## When does a link limit?
#
# Data parallel training sends about 2 bytes per parameter twice (lesson 3) and computes 6 flops per parameter and token
# (2 in the forward, 4 in the backward). The link is hidden behind the computation if
#
#     6 P tokens / flops_rate  >=  4 P / link_rate         so   tokens >= 4 flops_rate / (6 link_rate)
#
# P cancels: only the tokens of a device count. On the laptop the bound is small, on a fast device it is large.

# %%


def least_tokens(flops_rate, link_rate):
    """Return the tokens of a device for which sending gradients takes as long as computing them."""
    return 4 * flops_rate / (6 * link_rate)


for name, link in links.items():
    best = max(rate for _, rate in link.bandwidth)
    print(f"h100, {name}: {least_tokens(h100.device.peak['bfloat16'], best):,.0f} tokens a device")
fast, slow = (max(rate for _, rate in link.bandwidth) for link in links.values())
assert least_tokens(1e15, slow) > least_tokens(1e15, fast), "a slower link needs more tokens"

# %% [markdown]
# `meshwise bench calibrate` measures this machine in the same way, and `meshwise simulate` computes with the result.
#
# ## Exercise
#
# Write `answer(flops, rate, size, bandwidth)`: the seconds of a step that computes `flops` and sends `size` bytes **at
# the same time**, without latency.

# %%


def answer(flops, rate, size, bandwidth):
    return flops / rate + size / bandwidth


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    if answer(8.0, 2.0, 1.0, 1.0) == 5.0:
        return "the two times are added: that is a step that first computes and then sends"
    if answer(8.0, 2.0, 1.0, 1.0) != 4.0:
        return "with 4 s of computation and 1 s of sending the step takes 4 s"
    if answer(2.0, 2.0, 9.0, 3.0) != 3.0:
        return "with 1 s of computation and 3 s of sending the step takes 3 s"
    return ""


print(check(answer) or "right")
