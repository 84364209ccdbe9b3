"""Types and functions that all other folders use: meshes, batches, timelines, text tables, atomic files."""
