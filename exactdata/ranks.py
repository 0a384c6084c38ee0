"""Find the rank of this process in torch.distributed. Imports no torch."""

from __future__ import annotations

import sys
from typing import Any


def current_ranks() -> tuple[int, int]:
    """Return (rank, world size) of torch.distributed; (0, 1) if it is not in use. Imports no torch."""
    distributed: Any = sys.modules.get("torch.distributed")
    initialized = getattr(distributed, "is_initialized", None)  # absent from a torch that is built without it
    if initialized is None or not initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
