"""Commands that start runs, continue them, fork them, and evaluate what they have saved."""
