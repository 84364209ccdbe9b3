"""What a forward does to a part of the stream as if it were all is refused, and nothing else is."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.tensor import tensor_parallel as parallelism
from meshwise.tensor.checks.sharded_activation_check import HiddenSplit, ShardedActivationCheck
from meshwise.tensor.core.gathered_outputs import GatheredOutputs
from meshwise.testing import Disagreement, agree, alone, outcome, run
from tensor.plain import Attention

Change = Callable[[Tensor], Tensor]

WIDTH, TOKENS, WORDS = 16, 6, 19
CHANGES: dict[str, Change] = {
    "add": lambda x: x + 1,
    "outer": lambda x: x * x[:, :1, :1],
    "where": lambda x: torch.where(x > 0, x, -x),
    "cast": lambda x: x.float().double(),
    "in place": lambda x: x.clone().mul_(2).add_(x),
    "transpose": lambda x: x.transpose(1, 2).contiguous(),
    "permute": lambda x: x.permute(2, 0, 1),
    "flatten": lambda x: x.flatten(1).tanh().view_as(x),
    "flatten rows": lambda x: x.flatten(0, 1).tanh().view_as(x),
    "flatten rows, cumsum": lambda x: x.flatten(0, 1).cumsum(0).view_as(x),
    "rows of a flat one": lambda x: x.flatten(0, 1).view(x.shape).sum(0),
    "groups": lambda x: x.unflatten(-1, (4, -1)).softmax(-2),
    "groups of one size": lambda x: x.view(*x.shape[:2], -1, 4).softmax(-1).flatten(2),
    "unsqueeze": lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1).squeeze(0),
    "sum of rows": lambda x: x.sum(0),
    "mean of tokens": lambda x: x - x.mean(1, keepdim=True),
    "mean of features": lambda x: x - x.mean(-1, keepdim=True),
    "mean": lambda x: x * x.mean(),
    "deviation": lambda x: x.std((1, 2)),
    "largest token": lambda x: x.amax(1),
    "largest feature": lambda x: x.max(-1).values,
    "norm": lambda x: functional.normalize(x, dim=-1),
    "length": lambda x: 1 + torch.linalg.vector_norm(x),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "group norm": lambda x: functional.group_norm(x.transpose(1, 2), 4),
    "instance norm": lambda x: functional.instance_norm(x.transpose(1, 2)),
    "batch norm": lambda x: functional.batch_norm(x.transpose(1, 2), None, None, training=True),
    "softmax of tokens": lambda x: x.softmax(1),
    "softmax of features": lambda x: x.softmax(-1),
    "cumsum of tokens": lambda x: x.cumsum(1),
    "cumsum of features": lambda x: x.cumsum(-1),
    "flip tokens": lambda x: x.flip(1),
    "flip features": lambda x: x.flip(-1),
    "roll tokens": lambda x: x.roll(1, 1),
    "roll all": lambda x: x.roll(1),
    "sort features": lambda x: x.sort(-1).values,
    "best two": lambda x: x.topk(2, dim=-1).values,
    "shift tokens": lambda x: functional.pad(x[:, 1:], (0, 0, 0, 1)),
    "pad tokens": lambda x: functional.pad(x, (0, 0, 1, 0)),
    "pad features": lambda x: functional.pad(x, (1, 0)),
    "first token": lambda x: x + x[:, :1],
    "one token": lambda x: x[:, 0].tanh(),
    "every other feature": lambda x: x[..., ::3] * 2,
    "all of them": lambda x: x[:, : x.size(1), : x.size(2)] + 1,
    "one row": lambda x: x[0] + 1,
    "chosen rows": lambda x: x[torch.tensor([1, 0, 1])],
    "chosen tokens": lambda x: x[:, torch.tensor([1, 0])],
    "gathered tokens": lambda x: x.gather(1, torch.zeros(2, 1, x.size(2), dtype=torch.long)),
    "halves": lambda x: torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1),
    "beside itself": lambda x: torch.cat([x, x], 1),
    "one after the other": lambda x: torch.cat([x, x], 0),
    "features beside": lambda x: torch.cat([x, x], -1),
    "stack": lambda x: torch.stack([x, x], 1).sum(1),
    "repeat tokens": lambda x: x.repeat(1, 2, 1),
    "repeat rows": lambda x: x.repeat(2, 1, 1),
    "glu": lambda x: functional.glu(x) + 1,
    "products of tokens": lambda x: x @ x.transpose(1, 2),
    "products of features": lambda x: x.transpose(1, 2) @ x,
    "einsum": lambda x: torch.einsum("btf,bsf->bts", x, x),
    "differences": lambda x: x[:, :, None] - x[:, None],
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "attention of heads": lambda x: functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    "distances": lambda x: torch.cdist(x, x),
    "pool": lambda x: functional.avg_pool1d(x.transpose(1, 2), 2, 1),
    "similarity": lambda x: functional.cosine_similarity(x, x + 1, dim=-1),
    "triangle": lambda x: x.tril(),
    "unfold": lambda x: x.unfold(1, 2, 1) * 1,
    "differences of steps": lambda x: x.diff(dim=1),
    "loss": lambda x: functional.mse_loss(x, torch.zeros_like(x)),
    "spectrum": lambda x: torch.fft.rfft(x, dim=-1).abs(),
    "linear": lambda x: functional.linear(x, torch.ones(3, x.size(-1), dtype=x.dtype)),
    "linear of tokens": lambda x: x.transpose(1, 2) @ torch.ones(x.size(1), 3, dtype=x.dtype),
    "convolution": lambda x: functional.conv1d(
        x.transpose(1, 2), torch.ones(x.size(2), 1, 3, dtype=x.dtype), padding=1, groups=x.size(2)
    ),
    "statistic": lambda x: x.detach().pow(2).mean(),
    "sizes": lambda x: x * x[:, 0].size(-1) ** 0 * x[..., -1].dim(),
    "checks": lambda x: x if not x.isnan().any() else -x,
    "numbered tokens": lambda x: x * torch.arange(x.size(1))[:, None],
    "numbered features": lambda x: x + torch.arange(x.size(-1)).to(x).exp(),
    "a table of tokens": lambda x: x + torch.linspace(0, 1, 99)[: x.size(1), None].double(),
    "numbers of rows": lambda x: x * torch.arange(x.size(0))[:, None, None],
    "numbers of nothing": lambda x: x + torch.arange(7).sum(),
    "dropout": lambda x: functional.dropout(x, 0.0),
}  # fmt: skip


class Body(nn.Module):
    """A block that does something to the stream, and nothing else."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


def is_right(change: Change, *, dim: int) -> bool:
    """Whether what it makes of two parts are parts of what it makes of both."""
    whole = torch.randn(2, TOKENS * 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    made = change(whole)
    try:
        parts = [change(part) for part in whole.chunk(2, dim)]
    except RuntimeError:
        return False
    return any(
        together.shape == made.shape and torch.allclose(together, made, rtol=1e-6)
        for together in (torch.cat(parts, place) for place in range(parts[0].dim()))
    )


def refusal(change: Change, *, dim: int) -> str:
    """What the watch says of it; nothing where it lets it pass."""
    body = Body(change)
    model = nn.Sequential(body, Body(lambda _: torch.zeros(1)))  # what it returns is no part
    size = (TOKENS, WIDTH // 2)[dim]
    split = HiddenSplit(("tokens", "features")[dim], (-2, -1)[dim], lambda: size, "Take another plan")
    ShardedActivationCheck(model, split=split, parts={}, blocks={body: True}, names=((), ()), leaving=GatheredOutputs())
    part = torch.randn(2, *((TOKENS, WIDTH), (TOKENS * 2, WIDTH // 2))[dim], dtype=torch.float64)
    try:
        model(part)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dim", [0, 1], ids=["tokens", "features"])
def test_what_is_wrong_of_parts_is_refused_and_what_is_right_is_not(dim: int) -> None:
    wrong = {name for name, change in CHANGES.items() if not is_right(change, dim=dim + 1)}
    assert {name for name, change in CHANGES.items() if refusal(change, dim=dim)} == wrong


# ---- whole models ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = Attention(WIDTH, 4, kv_heads=4)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.scale, self.factor = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(1))
        self.gate = nn.Linear(WIDTH, 1)
        self.use = use
        self.seen: Tensor | None = None

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        x = self.use(self, x, more)
        output: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return output


class Model(nn.Module):
    """Hands its blocks something besides the stream."""

    def __init__(self, use: Callable[..., Tensor], *, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.more = nn.Parameter(torch.randn(1))
        self.blocks = nn.ModuleList(Block(use) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.more.sigmoid())
        logits: Tensor = self.head(x)
        return logits


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    total = functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return total, batch[1].numel()


def check(use: Callable[..., Tensor], plan: str) -> None:
    """A step under a plan is that of one process, behind an evaluation."""
    torch.manual_seed(1)
    model = Model(use, layers=2 if "pp" in plan else 1).double()
    tokens = torch.randint(0, WORDS, (4, TOKENS + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    rules = dict.fromkeys(("more", "blocks.*.factor", "blocks.*.gate"), "whole")
    settings: dict[str, Any] = {"loss": loss, "lr": 1e-2}

    def main(world: World) -> Any:
        options = Options(tensor_rules=rules, example=batch)
        trainer = parallelize(copy.deepcopy(model), plan, world=world, options=options, **settings)
        trainer.evaluate([batch])
        return outcome(trainer, batches=[batch, batch])

    expected = alone(model, batches=[batch, batch], **settings)
    for found in run(Plan.parse(plan).mesh().size, main):
        agree(found, expected, bound=1e-9)


def keep_a_mean(block: Block, x: Tensor, _more: Tensor) -> Tensor:
    block.seen = x.pow(2).mean() * 0.1
    return x + block.seen


SEQUENCE, GRID = "tp=2 sequence_parallel=1", "tp=4 tp_mode=2d"
WRONG: dict[str, tuple[str, Callable[..., Tensor], str]] = {
    "a mean of tokens": (
        SEQUENCE,
        lambda _block, x, _: x - x.mean(1, keepdim=True),
        r"blocks\.0 \(Block\) mixes the",
    ),
    "a statistic": (SEQUENCE, keep_a_mean, r"mixes the tokens of the stream \(mean\).*sequence_parallel=0"),
    "handed over": (SEQUENCE, lambda _block, x, more: x * more, "all ranks have alike, a gradient from"),
    "a softmax": (GRID, lambda block, x, _: x * block.scale.softmax(-1), r"mixes the features of.*softmax.*tp_mode=1d"),
    "a gate": (GRID, lambda block, x, _: x * block.gate(x).sigmoid(), "all ranks have alike, a gradient from"),
}


@pytest.mark.parametrize("plan, use, message", WRONG.values(), ids=WRONG)
def test_what_would_be_wrong_is_refused(
    monkeypatch: pytest.MonkeyPatch, plan: str, use: Callable[..., Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(use, plan)
    monkeypatch.setattr(parallelism, "watch", lambda *_args, **_given: None)
    with pytest.raises(Disagreement):
        check(use, plan)


def by_itself(block: Block, x: Tensor, more: Tensor) -> Tensor:
    """Every feature, and every token, by itself."""
    flat = x.flatten(0, 1).clone().mul_(2).add_(block.scale)
    y = flat.view_as(x) + torch.stack([x, -x], 0).amax(0) * more.detach()
    rows, tokens, _ = x.shape
    return y.transpose(1, 2).clamp(-3, 3).mT + torch.cat([x, x], 0).view(2, rows, tokens, -1).sum(0)


def with_a_gate(block: Block, x: Tensor, _more: Tensor) -> Tensor:
    """Every token by itself."""
    x = x * block.gate(x).sigmoid() * block.factor
    return functional.normalize(x, dim=-1) + x.cumsum(-1) + x.flip(-1).softmax(-1)


RIGHT = {
    f"{SEQUENCE} recompute=full": by_itself,
    f"{SEQUENCE} dp=2 zero=3": with_a_gate,
    f"{SEQUENCE} pp=2 microbatches=2 recompute=selective": with_a_gate,
    f"{GRID} zero=3 recompute=selective": by_itself,
    f"{SEQUENCE} offload=activations:cpu": by_itself,
    "tp=2": lambda _block, x, more: x * more - x.mean(1, keepdim=True) + x.softmax(-1),
}


@pytest.mark.parametrize("plan", RIGHT)
def test_what_is_right_passes(plan: str) -> None:
    check(RIGHT[plan], plan)


# ---- forwards that do not come to an end -----------------------------------------------------------------------------


class Catches(Model):
    """Goes on after an exception that a module raised."""

    def forward(self, tokens: Tensor) -> Tensor:
        with contextlib.suppress(IndexError):
            self.embedding(tokens + WORDS)
        return super().forward(tokens)


@pytest.mark.parametrize("error", [None, LookupError, KeyboardInterrupt, IndexError])
def test_a_forward_that_did_not_come_to_its_end_is_watched_again(error: type[BaseException] | None) -> None:
    fails = error in (LookupError, KeyboardInterrupt)

    def tries(use: Callable[..., Tensor]) -> list[str]:
        def once(block: Block, x: Tensor, more: Tensor) -> Tensor:
            if vars(block).pop("fails", False):
                assert error is not None
                raise error
            return use(block, x, more)

        model = (Catches if error is IndexError else Model)(once, layers=1)
        batch = torch.zeros(2, TOKENS, dtype=torch.int64)

        def main(world: World) -> list[str]:
            options = Options(tensor_rules=dict.fromkeys(("more", "blocks.*.factor", "blocks.*.gate"), "whole"))
            trainer = parallelize(copy.deepcopy(model), SEQUENCE, world=world, loss=loss, lr=1e-2, options=options)
            vars(trainer.model.get_submodule("blocks.0"))["fails"] = fails
            said = []
            for _ in range(3):
                try:
                    trainer.step((batch, batch))
                    said.append("")
                except (ValueError, LookupError, KeyboardInterrupt) as problem:
                    said.append(str(problem) or "failed")
            return said[fails:]

        found: list[str] = run(2, main)[0]
        return found

    assert all("mixes the tokens" in said for said in tries(lambda _block, x, _: x - x.mean(1, keepdim=True)))
    assert not any(tries(lambda _block, x, _: x.clone()))


@pytest.mark.threads("it counts in this process")
def test_the_forward_of_a_stage_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that leaves the model to the next stage, micro-batch by micro-batch."""
    entered, begun = ShardedActivationCheck.__enter__, list[ShardedActivationCheck]()

    def enter(watching: ShardedActivationCheck) -> Any:
        begun.append(watching)
        return entered(watching)

    monkeypatch.setattr(ShardedActivationCheck, "__enter__", enter)
    batch = torch.zeros(4, TOKENS, dtype=torch.int64)

    def main(world: World) -> None:
        rules = dict.fromkeys(("more", "blocks.*.factor", "blocks.*.gate"), "whole")
        options = Options(example=(batch, batch), tensor_rules=rules)
        model = Model(lambda _block, x, _: x.clone(), layers=2)
        plan = f"{SEQUENCE} pp=2 microbatches=4"
        parallelize(model, plan, world=world, loss=loss, lr=1e-2, options=options).step((batch, batch))

    run(4, main)
    assert len(begun) == len(set(map(id, begun))) == 4


class InChunks(Model):
    """Calls its head on as many tokens at a time as a rank has, and its block with a mask before the stream."""

    def __init__(self) -> None:
        super().__init__(lambda _block, x, _: x, layers=1)
        self.blocks = nn.ModuleList([Masked()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.more
        x = self.blocks[0](mask=torch.ones(TOKENS, TOKENS, dtype=x.dtype), hidden_states=x)
        return torch.cat([self.head(part) for part in x.split(TOKENS // 2, 1)], 1)


class Masked(Block):
    def __init__(self) -> None:
        super().__init__(lambda _block, x, _: x)

    def forward(self, *, mask: Tensor, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_states, mask) * mask.softmax(-2).sum()


def test_what_only_looks_like_a_part_is_let_pass() -> None:
    model = InChunks().double()
    tokens = torch.randint(0, WORDS, (4, TOKENS + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    rules = dict.fromkeys(("more", "blocks.*.factor", "blocks.*.gate"), "whole")

    def main(world: World) -> Any:
        options = Options(tensor_rules=rules)
        trainer = parallelize(copy.deepcopy(model), SEQUENCE, world=world, loss=loss, lr=1e-2, options=options)
        return outcome(trainer, batches=[batch])

    expected = alone(model, batches=[batch], loss=loss, lr=1e-2)
    for found in run(2, main):
        agree(found, expected, bound=1e-9)
