"""Watch the ranks of a job: notice lost ranks and hangs, and report which rank waits for which other ranks."""
