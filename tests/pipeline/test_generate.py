"""Test the message for a script that calls its stage of a pipeline itself."""

import pytest
import torch

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.pipeline.run.stage_forward import StageError
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import run


def test_a_script_that_calls_its_stage_is_told_to_predict() -> None:
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    shape = GPTConfig(vocabulary=16, context=4, layers=2, heads=2, width=8)

    def main(world: World) -> None:
        options = Options(example=(tokens, tokens))
        trainer = parallelize(lambda: GPT(shape), "pp=2", world=world, loss=next_token_loss, lr=0.1, options=options)
        assert trainer.predict((tokens, tokens)).shape == (2, 4, 16)
        trainer.model(tokens)

    with pytest.raises(StageError, match=r"calls trainer\.model itself, as generate does, call trainer\.predict"):
        run(2, main)
