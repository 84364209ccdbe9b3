"""Reading a model's structure: matrices, the pairs they form, heads, norms."""
