"""The dtypes that a model is stored, computed, reduced and updated in, and the loss scale of fp16."""
