"""Check how images and texts become PNG files, and how loggers receive them."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorders import Bar, recorder_of

from runner.errors import UserError
from runner.metrics.media import Media, file_name, png, size_of
from runner.metrics.tensorboard import TensorBoard
from runner.rundir.paths import RunDir
from runner.system import files
from runner.training.records.recorder import RunRecorder

Image = pytest.importorskip("PIL.Image")
PIXELS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


def decoded(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (PIXELS, PIXELS),
        (PIXELS[:, :, 0], PIXELS[:, :, 0]),
        (PIXELS[:, :, :1], PIXELS[:, :, 0]),
        (PIXELS / 255, PIXELS),
        (torch.from_numpy(PIXELS).permute(2, 0, 1), PIXELS),
        (torch.from_numpy(PIXELS).permute(2, 0, 1).to(torch.bfloat16) * 0, PIXELS * 0),
        (np.full((3, 7, 9), 2.0), np.full((7, 9, 3), 255)),
        (np.dstack([PIXELS, PIXELS[:, :, 0]]), np.dstack([PIXELS, PIXELS[:, :, 0]])),
        (Image.fromarray(PIXELS), PIXELS),
        (png(PIXELS), PIXELS),
    ],
)
def test_every_kind_of_image(image: Any, expected: np.ndarray) -> None:
    content = png(image)
    assert np.array_equal(decoded(content), expected)
    assert size_of(content) == (expected.shape[1], expected.shape[0])


def test_figure_becomes_a_png() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(2, 1), dpi=50)
    assert decoded(png(figure)).shape == (50, 100, 4)


@pytest.mark.parametrize(
    "image", [np.zeros(3), np.zeros((0, 3)), np.zeros((2, 2), int), torch.zeros(2, 5, 5, 5), b"GIF"]
)
def test_other_values_are_not_images(image: Any) -> None:
    with pytest.raises(UserError, match="cannot be logged"):
        png(image)


def test_names_of_files() -> None:
    assert file_name("samples/prose 1", 20, "txt") == "samples/prose 1-00000020.txt"
    for name in ("", "/etc/passwd", "../x", "a/../b", ".hidden", "a//b", "a\n", "x" * 101, 3):
        with pytest.raises(UserError, match="a file is named after it"):
            file_name(name, 1, "txt")


@pytest.fixture
def recorder(tmp_path: Path) -> RunRecorder:
    run = RunDir(tmp_path)
    return recorder_of(run, TensorBoard(run))


def test_tensorboard_shows_images_and_texts(recorder: RunRecorder, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = RunDir(tmp_path)
    recorder.media(Media(3, "a/picture", run.artifacts / "a/picture-3.png", png(PIXELS)))
    recorder.media(Media(4, "text", run.artifacts / "text-4.txt", "one\ntwo"))
    recorder.callback(4, "on_save", {"mine": 2.0})
    recorder.close()
    events = accumulator.EventAccumulator(str(run.tensorboard)).Reload()
    (image,) = events.Images("a/picture")
    assert (image.step, image.width, image.height) == (3, 7, 5)
    assert np.array_equal(decoded(image.encoded_image_string), PIXELS)
    (text,) = events.Tensors("text/text_summary")
    assert text.tensor_proto.string_val == [b"    one\n    two\n"]
    assert [event.value for event in events.Scalars("mine")] == [2.0]
    assert (run.artifacts / "text-4.txt").read_text() == "one\ntwo"
    assert np.array_equal(decoded((run.artifacts / "a/picture-3.png").read_bytes()), PIXELS)


def test_a_full_disk_is_a_warning(recorder: RunRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = RunDir(tmp_path).artifacts / "text-4.txt"

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomic", full)
        recorder.media(Media(4, "text", path, "one"))
    assert isinstance(recorder.bar, Bar)
    assert recorder.bar.said == [f"warning: {path} could not be written (No space left on device): it is lost"]
    recorder.media(Media(4, "text", path, "one"))
    assert path.read_text() == "one"
    recorder.close()
