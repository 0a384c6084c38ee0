"""Checkpoints as files: their directory, manifests, commits, deletions and pins. Imports no torch."""
