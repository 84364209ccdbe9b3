# %% [markdown]
# # 20. Choosing a plan
#
# First memory, then time. For P parameters in mixed precision with n = dp · tp · pp devices, a device needs about
#
#     memory     16 P / (tp pp), of which zero=1 splits 12 over dp and zero=3 all of it       plus activations
#     compute    6 P tokens / (n · flops per second)
#     tp sends   4 all-reduces of tokens/dp · h numbers in each layer    links inside a node
#     dp sends   2 P / (tp pp) numbers, twice                            links between nodes, hidden behind the backward
#     pp waits   (p - 1) / m of the compute time
#
# Rule of thumb: split over dp with ZeRO while it fits and the links keep up; tp inside a node; pp between nodes.
#
# Papers: Narayanan et al., arXiv 2104.04473, section 3; Rajbhandari et al., arXiv 1910.02054.

# %%
import torch

import meshwise as mw
from meshwise.base.text_format import align_columns
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.simulate.cluster import parse_cluster
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import predict
from meshwise.view.drawing_data import comparison_table, predicted_account

LAYERS, WIDTH, CONTEXT, BATCH, GPUS = 4, 8192, 1024, 64, 16
P = 12 * LAYERS * WIDTH**2
cluster = parse_cluster("2x8 a100-80")
print(f"{P / 1e9:.1f} B parameters on {GPUS} GPUs of {cluster.device.memory / 2**30:.0f} GiB")

# %% [markdown]
# ## By hand

# %%

FLOPS = 0.5 * cluster.device.peak["bfloat16"]  # what products reach
INSIDE = max(rate for _, rate in cluster.inside.bandwidth)
BETWEEN = max(rate for _, rate in cluster.between.bandwidth)


def estimate(plan):
    """Return (seconds of a step, GiB of model state) of one device."""
    dp, tp, pp = plan.dp, plan.tp, plan.pp
    own = P / (tp * pp)
    state = {0: 16 * own, 1: 4 * own + 12 * own / dp, 3: 16 * own / dp}[plan.zero]
    compute = 6 * P * BATCH * CONTEXT / GPUS / FLOPS
    tokens = BATCH * CONTEXT / dp
    per_layer = 2 * (tp - 1) / tp * tokens * WIDTH * 2 / INSIDE  # an all-reduce in bf16
    tensor = 4 * LAYERS / pp * per_layer
    data = 2 * (dp - 1) / dp * own * 2 * (1.5 if plan.zero == 3 else 1) / (BETWEEN if dp > 1 else INSIDE)
    bubble = compute * (pp - 1) / plan.microbatches
    return compute + tensor + bubble + max(0.0, data - compute), state / 2**30


PLANS = ["dp=16", "dp=16 zero=3", "dp=2 tp=8 zero=1", "dp=8 tp=2 zero=1", "dp=4 pp=4 zero=1 microbatches=16"]
hand = {line: estimate(mw.Plan.parse(line)) for line in PLANS}

# %% [markdown]
# ## With meshwise: the training code itself, on tensors without values

# %%
shape = GPTConfig(vocabulary=1024, context=CONTEXT, layers=LAYERS, heads=64, width=WIDTH)
tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.int64)
subject = RehearsalSubject(lambda: GPT(shape), next_token_loss, (tokens, tokens), arguments={"lr": 1e-4})
found, accounts = {}, []
print("plan                               by hand            rehearsed")
for line in PLANS:
    prediction = predict(rehearse(subject, plan=f"{line} precision=bf16", ranks=GPUS, device="cuda"), cluster=cluster)
    accounts.append(predicted_account(prediction, title=line))
    peak = max(rank.peak.bytes for rank in prediction.memory) / 2**30
    found[line] = (prediction.seconds, peak, prediction.fits)
    seconds, state = hand[line]
    fits = "fits" if prediction.fits else "does not fit"
    print(f"{line:33} {seconds:5.2f} s {state:5.1f} GiB   {prediction.seconds:5.2f} s {peak:5.1f} GiB  {fits}")
print(align_columns(comparison_table(accounts)))
assert all(found[line][1] > hand[line][1] * 0.95 for line in PLANS), "activations come on top of the state"
assert found["dp=16"][1] > 2.5 * found["dp=16 zero=3"][1]
assert found["dp=2 tp=8 zero=1"][0] > found["dp=8 tp=2 zero=1"][0], "more tp, more traffic in every layer"
best = min((line for line in PLANS if found[line][2]), key=lambda line: found[line][0])
by_formula = min((line for line in PLANS if hand[line][1] < 60), key=lambda line: hand[line][0])
print(f"best of these: rehearsed {best}, by the formulas {by_formula}")
assert found[by_formula][0] < 1.25 * found[best][0], "the formulas choose a plan that is nearly as good"

# %% [markdown]
# `meshwise plan job.toml --on "2x8 a100-80"` searches all plans, with bounds that prove which is best.
#
# ## Exercise
#
# Write `answer(P, memory, n)`: the lowest ZeRO stage (0, 1 or 3) for which the model state of P parameters (16 bytes
# each, 12 of them Adam's and masters) fits into `memory` bytes on n data parallel ranks; None if none fits.

# %%


def answer(P, memory, n):
    return 3


def check(answer):
    """Return what is wrong with an answer, or an empty text."""
    cases = (((100, 1600, 4), 0), ((100, 1599, 4), 1), ((100, 700, 4), 1), ((100, 699, 4), 3), ((100, 399, 4), None))
    for (P, memory, n), wanted in cases:
        if (got := answer(P, memory, n)) != wanted:
            return f"P={P}, memory={memory}, n={n}: stage {wanted}, not {got}"
    return ""


print(check(answer) or "right")
