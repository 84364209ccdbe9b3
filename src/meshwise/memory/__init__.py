"""Tiers and recomputation: where state rests between its uses, and how it moves; see docs/memory.md."""
