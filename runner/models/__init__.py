"""Models, losses and tasks shipped with the runner. To use different ones, set `_target_`."""
