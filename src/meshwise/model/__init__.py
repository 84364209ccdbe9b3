"""A model seen from outside: its parameters, its blocks, and how it is born."""
