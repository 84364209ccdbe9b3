"""A rehearsal knows what a forward asks of what it made of sizes alone, and of nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.simulate.constants import LARGEST, Constants
from meshwise.simulate.rehearsal import Rehearsal, rehearse
from meshwise.simulate.subject import Subject
from meshwise.simulate.tape import Operation


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
def test_what_is_made_of_sizes_is_known(case: str) -> None:
    ask, answer = KNOWN[case]
    with Constants():
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
def test_what_is_not_has_no_value(case: str) -> None:
    with Constants(), pytest.raises(RuntimeError, match="meta tensors"):
        UNKNOWN[case]().item()


def test_what_only_a_gpu_computes_is_left_unknown() -> None:
    def fails(*_: object) -> Tensor:
        raise NotImplementedError

    with torch.library._scoped_library("meshwise_tests", "DEF") as library:
        library.define("alone(Tensor x) -> Tensor")
        library.impl("alone", torch.empty_like, "Meta")
        library.impl("alone", fails, "CPU")
        with Constants():
            made = torch.ops.meshwise_tests.alone(torch.ones(3, device="meta"))
            assert made.shape == (3,)
            with pytest.raises(RuntimeError, match="meta tensors"):
                made.sum().item()


def test_what_has_values_is_let_be() -> None:
    with Constants():
        assert torch.zeros(2).add_(1).tolist() == [1, 1]


class _Asks(nn.Module):
    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.up, self._asks = nn.Linear(4, 4), asks

    def forward(self, x: Tensor) -> Tensor:
        far = torch.arange(x.size(1), device=x.device) > 2
        return self.up(x) if not self._asks or bool(far.any()) else x


def loss(y: Tensor, x: Tensor) -> tuple[Tensor, int]:
    return y.square().sum(), len(x)


def operations(rehearsal: Rehearsal) -> list[str]:
    return [entry.name for segment in rehearsal.step(0) for entry in segment.entries if isinstance(entry, Operation)]


@pytest.mark.parametrize("plan", ["dp=2", "pp=2 microbatches=2"])
def test_a_model_that_asks_is_rehearsed_as_one_that_knows(plan: str) -> None:
    def of(*, asks: bool) -> Rehearsal:
        model = nn.Sequential(_Asks(asks=asks), _Asks(asks=asks))
        return rehearse(Subject(model, loss, torch.ones(8, 4)), plan=plan, ranks=2)

    asking = [name for name in operations(of(asks=True)) if "any" not in name and "scalar" not in name]
    assert asking == operations(of(asks=False))


def _own_loss(output: Any, batch: Any) -> tuple[Tensor, Any]:
    count = (batch["labels"] != -100).sum()
    return output.loss * count, count


@pytest.mark.parametrize("plan", ["dp=2 zero=3", "tp=2", "pp=2 microbatches=2"])
@pytest.mark.parametrize("family", ["Llama", "Bart"])
def test_models_of_transformers_are_rehearsed_as_they_are(family: str, plan: str) -> None:
    """They ask whether positions are those of one text, and whether a mask of ones is one of ones."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, which the extra hf installs")
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
    assert rehearse(Subject(model, _own_loss, {"input_ids": tokens, "labels": tokens}), plan=plan, ranks=2).step(0)
