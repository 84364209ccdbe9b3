"""Rehearsals: what a plan would cost on a cluster, found by running the project's own code on one rank of each kind."""
