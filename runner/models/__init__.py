"""Models and losses that the runner ships; any other is chosen by `_target_`."""
