"""A rehearsal knows what a forward asks of what it made of sizes and of its batch's integers, and of nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid
from meshwise.model.meta_tensor_values import LARGEST, ShapeConstants
from meshwise.simulate.rehearsal import LARGEST as LARGEST_OF_A_BATCH
from meshwise.simulate.rehearsal import MetaBatch, Rehearsal, RehearsalSubject, rehearse
from meshwise.simulate.step_tape import TapeOperation


def positions() -> Tensor:
    return torch.arange(5, device="meta").expand(2, -1)


def changed_with_known() -> Tensor:
    x = positions().clone()
    x[:, 1:] += torch.ones(2, 4, dtype=torch.long, device="meta")
    return x.sum()


KNOWN: dict[str, tuple[Callable[[], Any], Any]] = {
    "a difference": (lambda: bool((positions().diff(dim=-1) != 1).any()), False),
    "a mask": (lambda: int((torch.ones_like(torch.empty(3, device="meta")).to(torch.bool)).sum()), 3),
    "a table": (lambda: torch.full((2, 2), 7.5, device="meta").tril().tolist(), [[7.5, 0.0], [7.5, 7.5]]),
    "what is changed": (lambda: changed_with_known().item(), 28),
    "places": (lambda: (positions() > 2).nonzero().shape, (4, 2)),
    "ones as of the largest": (lambda: torch.empty(2**50, device="meta").new_ones(2).tolist(), [1, 1]),
    "rows of a table": (lambda: list(torch.eye(3, device="meta")[positions()[0, 1:3]].sum(0)), [0, 1, 1]),
    "rows of a mask": (lambda: list(positions()[positions() > 3]), [4, 4]),
    "what a CPU has": (lambda: list(torch.tensor([4]).to("meta") + positions()[0, -2:]), [7, 8]),
}


@pytest.mark.parametrize("case", KNOWN)
def test_values_made_of_sizes_are_known(case: str) -> None:
    ask, answer = KNOWN[case]
    with ShapeConstants() as constants, constants.forward():
        assert ask() == answer


def written_over() -> Tensor:
    x = torch.zeros(4, dtype=torch.long, device="meta")
    x.view(2, 2)[1].copy_(torch.empty(2, dtype=torch.long, device="meta"))
    return x.sum()


UNKNOWN: dict[str, Callable[[], Tensor]] = {
    "a batch": lambda: torch.empty(2, device="meta").sum(),
    "both": lambda: torch.add(positions(), torch.empty(5, dtype=torch.long, device="meta")).sum(),
    "what is written over": written_over,
    "what is large": lambda: torch.zeros(LARGEST + 1, device="meta").sum(),
    "what is drawn": lambda: torch.randint(2, (3,), device="meta").sum(),
    "what is drawn with known odds": lambda: torch.bernoulli(torch.full((3,), 0.5, device="meta")).sum(),
    "what is drawn on the CPU": lambda: torch.rand(3, device="cpu").mul(2).to("meta").sum(),
    "what is drawn into zeros": lambda: torch.zeros(3, device="meta").uniform_().sum(),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_other_tensors_have_no_values(case: str) -> None:
    with ShapeConstants() as constants, constants.forward(), pytest.raises(RuntimeError, match="meta tensors"):
        UNKNOWN[case]().item()


def test_values_that_only_a_gpu_computes_are_unknown() -> None:
    def fails(*_: object) -> Tensor:
        raise NotImplementedError

    with torch.library._scoped_library("meshwise_tests", "DEF") as library:
        library.define("alone(Tensor x) -> Tensor")
        library.impl("alone", torch.empty_like, "Meta")
        library.impl("alone", fails, "CPU")
        with ShapeConstants() as constants, constants.forward():
            made = torch.ops.meshwise_tests.alone(torch.ones(3, device="meta"))
            assert made.shape == (3,)
            with pytest.raises(RuntimeError, match="meta tensors"):
                made.sum().item()


def test_tensors_with_values_are_left_alone() -> None:
    with ShapeConstants() as constants, constants.forward():
        assert torch.zeros(2).add_(1).tolist() == [1, 1]
        assert torch.tensor([0, 1]).nonzero().tolist() == [[1]]
        assert not torch.tensor([0, 1]).nonzero().is_meta


def test_values_that_are_not_read_are_not_computed() -> None:
    """An engine makes buffers of zeros as large as parameters, and leaves them as they are."""
    with ShapeConstants(), pytest.raises(RuntimeError, match="meta tensors"):
        torch.zeros(3, device="meta").sum().item()


BATCH = {"mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]), "x": torch.ones(3, 4)}


def written_into(mask: Tensor) -> bool:
    shown = torch.ones(2, 2, dtype=torch.bool, device="meta")
    row = shown[1]
    shown.masked_fill_(mask[:2, 2:] == 0, value=False)
    return bool(row.any())


def picked(mask: Tensor, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    found = x[mask != 0]
    found.square().sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    return found


OF_A_BATCH: dict[str, tuple[Callable[[Tensor, Tensor], Any], Any]] = {
    "a branch": (lambda mask, _: bool((mask[:2] != 0).all()), False),
    "rows": (lambda mask, _: mask[1:].sum(1).tolist(), [2, 4, 3, 2]),
    "rows over again": (lambda mask, _: mask[3:].tolist(), [[1, 1, 1, 0], [1, 1, 0, 0]]),
    "brought to a CPU": (lambda mask, _: mask.cpu().sum(1).max().item(), 4),
    "what it picks": (lambda mask, x: picked(mask, x).shape, (14,)),
    "what it picks of rows": (lambda mask, x: x[mask[:, 2] != 0, :2].shape, (3, 2)),
    "what it is written into": (lambda mask, _: written_into(mask), False),
    "what is written to it": (lambda mask, _: mask.clone().masked_fill_(mask != 0, 7).sum().item(), 98),
}


@pytest.mark.parametrize("case", OF_A_BATCH)
def test_the_integers_of_a_batch_are_known(case: str) -> None:
    ask, answer = OF_A_BATCH[case]
    batch = MetaBatch.of(BATCH, rows=5)
    with ShapeConstants(batch.values) as constants, constants.forward():
        assert ask(batch.batch["mask"], batch.batch["x"]) == answer


def test_other_numbers_of_a_batch_are_unknown() -> None:
    batch = MetaBatch.of(BATCH, rows=5)
    with (
        ShapeConstants(batch.values) as constants,
        constants.forward(),
        pytest.raises(RuntimeError, match="meta tensors"),
    ):
        batch.batch["x"].sum().item()


def test_writes_to_a_batch_reach_neither_the_user_nor_other_ranks() -> None:
    batch, before = MetaBatch.of(BATCH, rows=3), BATCH["mask"].clone()
    mask = batch.batch["mask"]
    with ShapeConstants(batch.values) as constants, constants.forward():
        corner = mask[1:, 2:]
        mask[:, 2] = 5
        assert mask.tolist() == [[1, 1, 5, 0], [1, 1, 5, 0], [1, 1, 5, 1]]
        assert corner.tolist() == [[5, 0], [5, 1]]
        corner.fill_(7)
        assert mask.amax().item() == 7
    with ShapeConstants(batch.values) as constants, constants.forward():
        assert mask.tolist() == before.tolist()
    assert torch.equal(BATCH["mask"], before)


def test_a_permuted_batch_has_its_values() -> None:
    batch = MetaBatch.of({"mask": torch.arange(24).view(2, 3, 4).transpose(1, 2)}, rows=2)
    mask = batch.batch["mask"]
    with ShapeConstants(batch.values) as constants, constants.forward():
        mask.view(2, 12)[:, 0] = 100
        assert mask[:, 0, 0].tolist() == [100, 100]


def test_a_batch_too_large_or_without_values_gives_none() -> None:
    bare = torch.empty(2, 3, dtype=torch.long, device="meta")
    large = torch.zeros(1, dtype=torch.bool).expand(LARGEST_OF_A_BATCH + 1)
    assert not MetaBatch.of(bare, rows=2).values
    assert not MetaBatch.of(large, rows=len(large)).values
    assert [known.shape for _, known in MetaBatch.of(large[:4], rows=6).values] == [(6,)]


class _Asks(nn.Module):
    """Asks whether it should compute: what it makes of sizes (`positions`), its batch (`mask`), or nobody."""

    def __init__(self, *, asks: str) -> None:
        super().__init__()
        self.up, self.down, self._asks = nn.Linear(4, 4), nn.Linear(4, 4), asks

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        far = torch.arange(x.size(1), device=x.device) > 2 if self._asks == "positions" else mask
        return self.down(self.up(x)) if self._asks == "nobody" or bool(far.any()) else x


class _Blocks(nn.Module):
    def __init__(self, *, asks: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Asks(asks=asks) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


def loss(y: Tensor, batch: Any) -> tuple[Tensor, int]:
    return y.square().sum(), len(y)


def operations(rehearsal: Rehearsal) -> list[str]:
    return [
        entry.name for segment in rehearsal.steps[0] for entry in segment.entries if isinstance(entry, TapeOperation)
    ]


PLANS = (
    "dp=2",
    "dp=2 recompute=full",
    "dp=2 zero=3 recompute=selective",
    "pp=2 microbatches=2",
    "pp=2 microbatches=2 recompute=full",
    "pp=2 microbatches=2 schedule=zb-h1 recompute=full",
)


@pytest.mark.grid(Grid({"plan": PLANS, "asks": ("positions", "mask")}, strength=1))
def test_a_model_that_reads_its_batch_is_rehearsed_like_one_with_constants(plan: str, asks: str) -> None:
    def of(asks: str) -> Rehearsal:
        batch = {"x": torch.ones(8, 4), "mask": torch.ones(8, 4, dtype=torch.bool)}
        return rehearse(RehearsalSubject(_Blocks(asks=asks), loss, batch), plan=plan, ranks=2)

    asking, knowing = of(asks), of("nobody")
    questions = ("any", "scalar", "arange", "gt")
    assert [name for name in operations(asking) if not name.startswith(questions)] == operations(knowing)


def _own_loss(output: Any, batch: Any) -> tuple[Tensor, Any]:
    count = (batch["labels"] != -100).sum()
    return output.loss * count, count


TRANSFORMERS = Grid(
    {
        "family": ("Llama", "Bart"),
        "batch": ("tokens", "whole", "padded"),
        "plan": ("dp=2 zero=3 recompute=full", "tp=2", "pp=2 microbatches=2"),
    },
    strength=1,
)


@pytest.mark.grid(TRANSFORMERS)
def test_models_of_transformers_are_rehearsed_as_they_are(family: str, batch: str, plan: str) -> None:
    """They ask whether positions are those of one text, and whether a mask is one of ones."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")
    if family == "Bart" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip("before transformers 5.23 BART reads a number that it draws, also where it drops no layers")
    torch.manual_seed(1)
    if family == "Llama":
        shape = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=11))
    else:
        shape = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
        sizes = {"d_model": 8, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "vocab_size": 11}
        ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2}
        model = transformers.BartForConditionalGeneration(transformers.BartConfig(**shape, **sizes, **ends))
    model.config.use_cache = False
    tokens = torch.randint(3, 11, (4, 5))
    rows = {"input_ids": tokens, "labels": tokens}
    if batch != "tokens":
        rows["attention_mask"] = torch.ones_like(tokens)
        rows["attention_mask"][0, 3:] = 1 if batch == "whole" else 0
    rehearsal = rehearse(RehearsalSubject(model, _own_loss, rows), plan=plan, ranks=2)
    assert rehearsal.steps[0]
