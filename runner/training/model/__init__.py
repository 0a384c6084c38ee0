"""Build the model, its optimizers and their schedules from the config."""
