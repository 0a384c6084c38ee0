"""Checkpoints as files: store, manifests, commits, deletions and pins. Imports no torch."""
