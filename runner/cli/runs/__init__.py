"""Commands that change whole runs and their checkpoints."""
