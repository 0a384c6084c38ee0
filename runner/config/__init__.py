"""From a command's overrides to a checked config, and from a run directory back to one."""
