"""Models and losses that the runner ships; any other model plugs in by `_target_`."""
