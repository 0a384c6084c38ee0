"""Checkpoints as files: their store, manifests, commits, deletions and pins. Imports no torch."""
