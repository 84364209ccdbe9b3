"""Start ranks, join them to a world, and collect their results."""
