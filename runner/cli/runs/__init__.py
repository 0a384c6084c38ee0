"""Commands that change runs and their checkpoints."""
