"""Models, losses and tasks of the runner. `_target_` selects any other."""
