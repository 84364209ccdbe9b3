"""Worlds inside one process: ranks as threads, or one rank alone whose calls are recorded."""
