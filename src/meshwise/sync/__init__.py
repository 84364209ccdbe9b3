"""Agreement of replicas across steps: the table of schemes, the graphs of neighbours, and the rounds."""
