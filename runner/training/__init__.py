"""Train a run: an attempt builds the model, restores the newest checkpoint, trains, and records the result."""
