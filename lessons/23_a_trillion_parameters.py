# %% [markdown]
# # 23. A trillion parameters, rehearsed
#
# Nobody tries 3,072 GPUs by trial and error. A rehearsal runs the training code itself on one rank of each kind, with
# tensors that have shapes and no values, and prices what it did.
#
#     parameters      12 L h² + vocabulary          L layers of width h
#     flops a token   6 P                           forward 2, backward 4
#     days            6 P · tokens / (n · utilisation · peak) / 86400
#
# Paper: Narayanan et al., arXiv 2104.04473, table 1: a model of 1,008 B parameters on 3,072 A100 at 52 % of the peak.

# %%
import time

import torch

from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.simulate.cluster import parse_cluster
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import predict

L, H, VOCABULARY, CONTEXT = 32, 51_200, 51_200, 2048  # fewer and wider layers than the paper's 128 x 25,600
PLAN = "tp=8 pp=32 dp=12 zero=1 microbatches=64 sequence_parallel=1 precision=bf16"
cluster = parse_cluster("384x8 a100-80")

# %% [markdown]
# ## By hand

# %%
P = 12 * L * H**2 + 2 * VOCABULARY * H
sequences = 12 * 64
tokens = sequences * CONTEXT
flops = 6 * P * tokens + 12 * L * H * CONTEXT * tokens / 2  # the second term: causal attention
ideal = flops / cluster.ranks / cluster.device.peak["bfloat16"]
bubble = (32 - 1) / 64
own = P / (8 * 32)
state = (2 + 4 + 12 / 12) * own  # bf16 parameters, fp32 gradients, 12 bytes over dp=12: about 7 bytes each
print(f"{P / 1e12:.2f} T parameters on {cluster.ranks:,} GPUs; one holds {own / 1e9:.2f} B")
print(f"by hand: at the peak {ideal:.1f} s a step, with the bubble {ideal * (1 + bubble):.1f} s")
print(f"state of a GPU: {state / 2**30:.0f} GiB")

# %% [markdown]
# ## Rehearsed
#
# No rank has a value of the model: the whole rehearsal needs less than 2 GB.

# %%
shape = GPTConfig(vocabulary=VOCABULARY, context=CONTEXT, layers=L, heads=320, width=H)
batch = torch.zeros(sequences, CONTEXT, dtype=torch.int64)
subject = RehearsalSubject(lambda: GPT(shape), next_token_loss, (batch, batch), arguments={"lr": 1e-4})
began = time.perf_counter()
prediction = predict(rehearse(subject, plan=PLAN, ranks=cluster.ranks, device="cuda"), cluster=cluster)
peak = max(rank.peak.bytes for rank in prediction.memory)
print(f"rehearsed in {time.perf_counter() - began:.0f} s: {prediction.seconds:.1f} s a step, {peak / 2**30:.0f} GiB")
print(f"bubble {prediction.bubble:.0%}, utilisation {prediction.utilisation:.0%}, fits: {prediction.fits}")
print(f"waits for {', '.join(f'{axis} {seconds:.2f} s' for axis, seconds in prediction.exposed.items())}")
assert prediction.fits
assert peak > state, "activations come on top"
assert ideal * (1 + bubble) < prediction.seconds < 4 * ideal, "slower than the peak, and not by orders of magnitude"
assert abs(prediction.model_flops - flops) < 0.1 * flops, "the rehearsal counts the flops of the formula"
days = 300e9 / tokens * prediction.seconds / 86400
print(f"300 B tokens take {days:,.0f} days")

# %% [markdown]
# More micro-batches make the bubble smaller: `microbatches=512` is a batch of 6,144 sequences, with a bubble of 6 %.
#
# ## Exercise
#
# Write `answer(P, tokens, devices, peak, utilisation)`: the days of a training.

# %%


def answer(P, tokens, devices, peak, utilisation):
    return 6 * P * tokens / (devices * peak) / 86400


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    got, wanted = answer(1e12, 450e9, 3072, 312e12, 0.5), 6e12 * 450e9 / (3072 * 312e12 * 0.5) / 86400
    if abs(got - wanted / 2) < 1e-6 * wanted:
        return "at the peak; devices reach a part of it"
    return "" if abs(got - wanted) < 1e-6 * wanted else f"{wanted:.1f} days, not {got:.1f}"


print(check(answer) or "right")
