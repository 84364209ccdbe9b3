"""Offload training state and activations to CPU memory or disk, and recompute activations; see docs/memory.md."""
