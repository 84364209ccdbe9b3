"""Values and files that all parts use: meshes, trees of tensors, timelines, text tables, files replaced whole."""
