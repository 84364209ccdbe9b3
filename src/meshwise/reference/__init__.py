"""Reference models: plain torch modules that know no rank, used by the demo, the tests and the benchmarks."""

from meshwise.reference.gpt import GPT, MLP, GPTConfig, MLPConfig, next_token_loss
from meshwise.reference.mixture_gpt import MixtureConfig, MixtureGPT

__all__ = ["GPT", "MLP", "GPTConfig", "MLPConfig", "MixtureConfig", "MixtureGPT", "next_token_loss"]
