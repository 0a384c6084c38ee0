"""Models, losses and tasks that the runner ships. `_target_` selects any other."""
