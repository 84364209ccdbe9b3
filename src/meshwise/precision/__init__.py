"""In which dtypes a model is kept, computed, summed and updated."""
