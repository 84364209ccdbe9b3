"""Reference models: plain torch modules that know no rank, used by the demo, the tests and the benchmarks."""

from meshwise.reference.gpt import GPT, GPTConfig, next_token_loss
from meshwise.reference.mixture_gpt import MixtureConfig, MixtureGPT
from meshwise.reference.mlp import MLP, MLPConfig

__all__ = ["GPT", "MLP", "GPTConfig", "MLPConfig", "MixtureConfig", "MixtureGPT", "next_token_loss"]
