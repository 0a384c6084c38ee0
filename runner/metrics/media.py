"""Images and texts of a step: write them as files in the run directory, for loggers to show."""

from __future__ import annotations

import io
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import UserError

if TYPE_CHECKING:
    import numpy as np

IMAGES = (
    "a matplotlib figure, a PIL image, PNG bytes, or an array or tensor of shape (height, width), "
    "(height, width, 3 or 4) or (1, 3 or 4, height, width), of uint8 or of floats from 0 to 1"
)
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLORS = {1: 0, 2: 4, 3: 2, 4: 6}  # PNG's color types, by the number of channels
_MAX_NAME = 100


@dataclass(frozen=True)
class Media:
    """An image or a text of one step.

    Attributes:
        step: completed steps.
        name: name that the user passed.
        path: file with the content.
        content: PNG bytes, or the text.
    """

    step: int
    name: str
    path: Path
    content: bytes | str


def file_name(name: Any, step: int, suffix: str) -> str:
    """Return `NAME-STEP.SUFFIX`, with the step in eight digits so that files sort by it. Slashes make subdirectories.

    Raises:
        UserError: the name is not valid for a file below a directory.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if len(str(name)) > _MAX_NAME or not all(re.fullmatch(r"[\w+=-][\w .+=-]*", part) for part in parts):
        raise UserError(
            f"the name {name!r} must be letters, digits and any of ' . _ + = - ', in parts between slashes, at most "
            f"{_MAX_NAME} characters: a file is named after it"
        )
    return f"{name}-{step:08d}.{suffix}"


def png(image: Any) -> bytes:
    """Encode an image as the bytes of a PNG file.

    Raises:
        UserError: the image is none of `IMAGES`.
    """
    if isinstance(image, bytes) and image.startswith(_SIGNATURE):
        return image
    buffer = io.BytesIO()
    if callable(getattr(image, "savefig", None)):
        image.savefig(buffer, format="png")
    elif callable(getattr(image, "save", None)) and hasattr(image, "getbands"):
        image.save(buffer, format="PNG")
    else:
        return _encoded(_pixels(image))
    return buffer.getvalue()


def _pixels(image: Any) -> np.ndarray:
    """Convert an array or a tensor to uint8 of shape (height, width, channels)."""
    import numpy as np

    is_tensor = callable(getattr(image, "detach", None))
    pixels: Any = image
    if is_tensor:
        pixels = (image.detach().float() if image.is_floating_point() else image).cpu().numpy()
    if isinstance(pixels, np.ndarray):
        if pixels.ndim == 3 and pixels.shape[0] in _COLORS and (is_tensor or pixels.shape[2] not in _COLORS):
            pixels = pixels.transpose(1, 2, 0)  # torch's order of the axes
        pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
        if np.issubdtype(pixels.dtype, np.floating):
            pixels = (np.nan_to_num(pixels).clip(0, 1) * 255).round().astype(np.uint8)
        if pixels.ndim == 3 and pixels.dtype == np.uint8 and pixels.shape[2] in _COLORS and pixels.size:
            found: np.ndarray = pixels
            return found
        raise UserError(f"an image of shape {image.shape} and {image.dtype} cannot be logged: pass {IMAGES}")
    raise UserError(f"a {type(image).__name__} cannot be logged as an image: pass {IMAGES}")


def _encoded(pixels: np.ndarray) -> bytes:
    """Encode pixels as PNG (ISO/IEC 15948), without a filter."""
    import numpy as np

    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLORS[channels], 0, 0, 0)
    # Each line begins with the number of its filter, 0: none.
    lines = np.zeros((height, 1 + width * channels), np.uint8)
    lines[:, 1:] = pixels.reshape(height, -1)
    return (
        _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines.tobytes(), 6)) + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def size_of(image: bytes) -> tuple[int, int]:
    """Return (width, height) of a PNG file."""
    width, height = struct.unpack(">II", image[16:24])
    return width, height
