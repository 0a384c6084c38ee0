"""The model, its optimizers and their schedules, built from the config."""
