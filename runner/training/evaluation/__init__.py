"""Evaluate during training: held-out data, metrics and results."""
