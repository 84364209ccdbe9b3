"""Choose the fastest plan for a cluster: list candidates, bound their time and memory, rehearse the best of them."""
