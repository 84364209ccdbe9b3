"""Worlds over gloo and NCCL, and the stores and threads that they need."""
