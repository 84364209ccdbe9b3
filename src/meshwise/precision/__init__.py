"""Choice of the dtypes of a training, conversion of parameters and activations to them, and the loss scale of fp16."""
