"""Build the model, the optimizers and their schedules from the config."""
