"""Start the ranks of a job, connect them, and collect their results or errors."""
