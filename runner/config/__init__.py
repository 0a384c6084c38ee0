"""Compose the overrides of a command to a checked config, and read it back from a run directory."""
