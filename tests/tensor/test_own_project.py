"""A project of the user's own, two files that know nothing of ranks, is the same model under tensor parallelism."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from grid import Grid
from last_outcome import alone, outcome
from meshwise import verify
from meshwise.cli.main import main
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan
from meshwise.testing import agree, run

MODEL = """
import torch
from torch import nn
from torch.nn import functional


class SelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head
        self.n_embd = n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Gated(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.gate = nn.Linear(n_embd, 2 * n_embd, bias=False)
        self.up = nn.Linear(n_embd, 2 * n_embd, bias=False)
        self.down = nn.Linear(2 * n_embd, n_embd, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = SelfAttention(n_embd, n_head)
        self.ln_2 = nn.RMSNorm(n_embd, eps=1e-6)
        self.mlp = Gated(n_embd)
        self.scale = nn.Parameter(torch.full((n_embd,), 0.5))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.scale * self.mlp(self.ln_2(x))


class Poet(nn.Module):
    def __init__(self, vocabulary=29, n_embd=16, n_head=4, layers=2, context=8):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(vocabulary, n_embd),
            wpe=nn.Embedding(context, n_embd),
            drop=nn.Dropout(0.1),
            h=nn.ModuleList([Layer(n_embd, n_head) for _ in range(layers)]),
            ln_f=nn.LayerNorm(n_embd),
        ))
        self.lm_head = nn.Linear(n_embd, vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, idx):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))
"""

TRAIN = """
import torch
from torch.nn import functional


def loss(logits, batch):
    targets = batch[1]
    total = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.flatten(), reduction="sum")
    return total, targets.numel()


def batches(steps):
    generator = torch.Generator().manual_seed(7)
    for rows in (8, 4, 7)[:steps]:
        text = torch.randint(29, (rows, 9), generator=generator)
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    (tmp_path / "poet_model.py").write_text(MODEL)
    (tmp_path / "poet_train.py").write_text(TRAIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("poet_model"), importlib.import_module("poet_train")
    for name in ("poet_model", "poet_train"):
        del sys.modules[name]


JOB = """
loss = "poet_train:loss"
[model]
name = "poet_model:Poet"
arguments = {vocabulary = 256, context = 8}
[data]
files = ["text.txt"]
context = 8
[train]
batch = 5
clip_norm = 0.5
"""


@pytest.mark.grid(Grid({"plan": ("tp=2", "tp=4 tp_mode=2d")}, heavy=lambda cell: "2d" in cell["plan"]))
def test_the_command_says_that_it_is_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plan: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = {"poet_model.py": MODEL, "poet_train.py": TRAIN, "job.toml": JOB, "text.txt": "It is a truth. " * 40}
    for name, text in files.items():
        Path(name).write_text(text)
    assert main(["verify", "job.toml", "--comm=threads", f"--plan={plan}"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{plan} is the same model as one process")
    assert "transformer.h.1.mlp.gate.weight" in text


@pytest.mark.parametrize("plan", ["tp=2 dp=2 zero=1", "tp=2 sequence_parallel=1"])
def test_the_function_says_so_too(project: tuple[Any, Any], plan: str) -> None:
    model, train = project
    report = verify(model.Poet, train.loss, list(train.batches(3)), plan, lr=1e-2)
    assert report.ok, str(report)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of peft
@pytest.mark.parametrize("plan", ["tp=2", "tp=4"])
def test_its_adapters_train_as_on_one_process(project: tuple[Any, Any], plan: str) -> None:
    """The attention takes the width of its heads from its input, and an adapter holds the matrix that reads it."""
    peft = pytest.importorskip("peft")
    model, train = project
    batches = list(train.batches(2))

    def build() -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=3, target_modules=["c_attn", "c_proj", "gate"], init_lora_weights=False)
        adapted: nn.Module = peft.get_peft_model(model.Poet(), config).double()
        return adapted

    def made(world: World) -> Trainer:
        return parallelize(build(), plan, world=world, loss=train.loss, options=Options(example=batches[0]), lr=1e-2)

    expected = alone(build(), loss=train.loss, batches=batches, lr=1e-2)
    for one in run(Plan.parse(plan).mesh().size, lambda world: outcome(made(world), batches=batches)):
        agree(one, expected, bound=1e-9)
