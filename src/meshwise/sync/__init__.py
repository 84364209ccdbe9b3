"""Agreement of replicas across steps: when they agree, about what, with whom, and how the result is applied."""
