"""From a command's overrides to a checked config, and from a run directory back to it.

Imports neither torch nor numpy. Hydra and omegaconf stay inside this package.
"""

from runner.config.composition import Composed, Composer, compose, freeze, load, load_plain
from runner.config.identity import Difference, differences, flatten, identity

__all__ = [
    "Composed",
    "Composer",
    "Difference",
    "compose",
    "differences",
    "flatten",
    "freeze",
    "identity",
    "load",
    "load_plain",
]
