"""Evaluate during training: held-out data, metrics, results."""
