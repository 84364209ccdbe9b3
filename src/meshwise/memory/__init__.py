"""Offload state and activations to tiers (CPU, disk), and recompute activations; see docs/memory.md."""
