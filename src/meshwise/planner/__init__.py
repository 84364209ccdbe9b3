"""Choose a plan for a cluster: list the candidates, bound their time and memory, and rehearse those that remain."""
