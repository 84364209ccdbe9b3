"""Measurements of the machine: what its links and collectives could do, and what they do."""
