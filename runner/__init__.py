"""runner: a Hydra-configured experiment runner for training that may be killed at any moment."""

__version__ = "0.1.0"
