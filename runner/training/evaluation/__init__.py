"""Evaluations during training: held-out data, metrics, results."""
