"""Classify shapes: PNG files, random augmentation, and a small CNN with batch norm."""

import random
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

SIDES = (3, 4, 40)


def draw(folder: Path, count: int) -> None:
    """Draw into another folder and rename it, so that several processes may do this at once."""
    pick = random.Random(folder.name).randint
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        for index in range(count):
            image = Image.new("L", (28, 28), pick(0, 100))
            circle, sides = (pick(11, 16), pick(11, 16), pick(7, 10)), SIDES[index % 3]
            ImageDraw.Draw(image).regular_polygon(circle, sides, pick(-20, 20), fill=pick(150, 255))
            image.save(Path(temporary, f"{index:04}.png"))
        with suppress(OSError):  # another process was first
            Path(temporary).rename(folder)


class Shapes:
    """A triangle, a square, a circle, a triangle, …: PNG files, drawn if there are none."""

    def __init__(self, folder: str, count: int, augment: nn.Module | None = None) -> None:
        if not Path(folder).exists():
            draw(Path(folder), count)
        self.files = sorted(Path(folder).glob("*.png"))
        self.augment = augment or nn.Identity()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.array(Image.open(self.files[index]), np.float32) / 255
        return self.augment(torch.from_numpy(pixels)[None]), index % 3


def cnn(width: int) -> nn.Module:
    """Build a network from images (B, 1, 28, 28) to logits (B, 3)."""
    first = nn.Conv2d(1, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU()
    second = nn.Conv2d(width, 2 * width, 3, stride=2), nn.BatchNorm2d(2 * width), nn.ReLU()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(72 * width, 3))


class Predictions:
    def on_evaluation(self, context: Any) -> None:
        """Draw a row of held-out images for each predicted class."""
        images = torch.stack([image for image, _ in iter(Shapes("held_out", 0))]).to(context.device)
        seen = context.model(images).argmax(1)
        rows = nn.utils.rnn.pad_sequence([images[seen == each, 0] for each in range(3)], batch_first=True)
        context.log_image("predictions", rows.movedim(1, 2).reshape(3 * 28, -1))
