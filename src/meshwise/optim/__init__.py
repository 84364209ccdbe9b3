"""Build torch optimizers over the flat slices that a rank owns, and save the hyperparameters of their groups."""
