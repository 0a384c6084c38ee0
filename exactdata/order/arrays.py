"""Define type aliases for numpy arrays. Does not import torch."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

I64: TypeAlias = NDArray[np.int64]
U64: TypeAlias = NDArray[np.uint64]
Flags: TypeAlias = NDArray[np.bool_]
