"""Read any model: its parameter table, its blocks, its deferred initialization, its random draws."""
