"""Test tools for split models: run ranks, compare with one process, count collectives."""
