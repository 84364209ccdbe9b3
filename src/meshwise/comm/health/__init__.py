"""Watch the ranks of a job: notice lost ranks and hangs, and report who waits for whom."""
