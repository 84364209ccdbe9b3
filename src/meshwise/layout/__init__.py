"""Where a tensor lives on a mesh, as arithmetic on tuples."""
