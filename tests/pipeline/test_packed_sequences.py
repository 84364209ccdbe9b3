"""Test that a pipeline refuses a PackedSequence between its pieces, and that what the message says works."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from meshwise.engine.parallelize import Options
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import PlanError
from meshwise.verify import verify


class Encoder(nn.Module):
    """Packs the tokens of each sentence, as Tacotron 2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = Encoder(), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.head(self.decoder(self.encoder(x, lengths)).tanh())


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch["x"])


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(4, 5, 8, generator=generator), "lengths": torch.tensor([5, 5, 5, 5])}]


@pytest.mark.parametrize("model", [Speech, Speech()])
def test_a_packed_sequence_between_pieces_is_refused_with_what_to_do(model: Any) -> None:
    with pytest.raises(PlanError, match=r"encoder\.lstm reads a PackedSequence.*CutOptions\(pieces="):
        verify(model, loss, batches(), "pp=2 microbatches=2", lr=1e-2)


def test_a_module_that_packs_may_be_one_piece() -> None:
    options = Options(cut=CutOptions(pieces=("encoder", "decoder")))
    assert verify(Speech(), loss, batches(), "pp=2 microbatches=2", lr=1e-2, options=options).ok
