"""Worlds over gloo and NCCL, and torch's key-value stores, through which the ranks of a job find each other."""
