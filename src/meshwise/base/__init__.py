"""Types and functions that all other folders use: meshes, batches, timelines, text tables, atomic files."""

__version__ = "0.1.0"
