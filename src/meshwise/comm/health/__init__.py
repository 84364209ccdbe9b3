"""Watch the ranks of a job: notice lost ranks and hangs, and report which ranks wait for which."""
