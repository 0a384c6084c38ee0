"""Commands that start, resume and fork runs, and evaluate their checkpoints."""
