"""`paced.loss` with a child process on rank FAIL_RANK. A signal to this process ends the child, too."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

import torch
from paced import loss as paced_loss
from torch import nn

from runner.system.signals import STOP


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Any:
    """Fail as a compilation does when a stop signal ends its compiler."""
    value = paced_loss(model, batch)
    if STOP and os.environ.get("RANK") == os.environ.get("FAIL_RANK"):
        subprocess.run(["/bin/sh", "-c", "kill -TERM $$"], check=True)
    return value
