"""Detection of the part of each module of a plain model: matrices, the pairs they form, heads, norms."""
