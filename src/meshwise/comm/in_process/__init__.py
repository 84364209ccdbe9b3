"""Worlds inside one process: one with a thread for each rank, and one with a single rank whose calls are recorded."""
