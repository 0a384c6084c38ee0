"""runner: a Hydra-configured experiment runner for training that may be killed at any moment."""

import logging

__version__ = "0.1.0"

# Modules log; who uses them decides where that is shown. Training shows and records warnings.
logging.getLogger(__name__).addHandler(logging.NullHandler())
