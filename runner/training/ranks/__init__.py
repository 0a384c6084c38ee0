"""Exchange data between the ranks of a run, and detect ranks that fail or hang."""
