"""Compose a command's overrides into a checked config, and read the config back from a run directory."""
