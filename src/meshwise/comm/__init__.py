"""Start the ranks of a job and let them communicate: the only package that imports torch.distributed."""
