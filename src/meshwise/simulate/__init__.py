"""Predict the time and memory of a plan on a cluster by running the training code on meta tensors."""
