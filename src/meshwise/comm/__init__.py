"""What joins the ranks: the only package that imports torch.distributed."""
