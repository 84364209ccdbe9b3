"""Measurements of the machine: its links, its collectives, and whether ranks can train on it."""
