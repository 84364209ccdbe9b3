"""Predict the time and memory of a plan on a cluster by running the project's own code on one rank of each kind."""
