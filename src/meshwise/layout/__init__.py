"""Layouts: the part of a tensor that each rank of a mesh stores, computed without tensors."""
