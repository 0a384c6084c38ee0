"""Find the rank of this process in torch.distributed, without importing torch."""

from __future__ import annotations

import sys
from typing import Any


def current_ranks() -> tuple[int, int]:
    """Return (rank, world size) from torch.distributed, or (0, 1) if it is not in use. Does not import torch."""
    distributed: Any = sys.modules.get("torch.distributed")
    initialized = getattr(distributed, "is_initialized", None)  # missing if torch was built without it
    if initialized is None or not initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
