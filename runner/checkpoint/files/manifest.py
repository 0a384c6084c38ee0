"""Read, write and verify the manifest of a checkpoint: the size and checksum of each file.

The manifest is written last, so a directory without one is not a checkpoint. It is canonical JSON and includes its own
checksum, so any changed byte is detected. This module does not import torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from runner.checkpoint.files.reading import patiently
from runner.checkpoint.files.store import BLOCK_BYTES, FileRecord, Stored, new_hash
from runner.errors import CheckpointError

T = TypeVar("T")

NAME = "manifest.json"
TRAIN_STATE = "train_state.pt"
VERSION = 2
"""Format version of checkpoints. This code reads no other version."""

BEST_METRIC = "eval_loss"
BEST_MODES = ("min", "max")

_LARGEST, _LARGEST_TIME = 2**62, 2.0**40
_MOST_BYTES = 64 << 20  # maximum size of a manifest, which is read into memory


class CorruptionError(Exception):
    """A checkpoint's bytes differ from the committed bytes. The message states the difference."""


@dataclass(frozen=True)
class Manifest:
    """Facts about a checkpoint that can be read without its other files.

    Attributes:
        step: completed optimizer steps.
        files: size and checksum of every file except the manifest, by name.
        version: format version.
        fence: fencing number of the attempt that wrote the checkpoint.
        fingerprint: JSON values that must match for a run to load the checkpoint.
        metric: value of the metric that ranks checkpoints, or None.
        metric_name: name of the metric, a key of an evaluation's record.
        metric_mode: one of `BEST_MODES`: `min` if the lowest value is best, `max` if the highest value is best.
        world_size: number of ranks that saved the checkpoint.
        created: time of the save in seconds since 1970, for display only.
    """

    step: int
    files: dict[str, FileRecord]
    version: int = VERSION
    fence: int = 0
    fingerprint: dict[str, Any] = field(default_factory=dict)
    metric: float | None = None
    metric_name: str = BEST_METRIC
    metric_mode: str = BEST_MODES[0]
    world_size: int = 1
    created: float = 0.0

    @property
    def size(self) -> int:
        """Return the total size of the files in bytes."""
        return sum(record.size for record in self.files.values())

    def encode(self) -> bytes:
        """Return the content of manifest.json."""
        body = asdict(self)
        return canonical({**body, "sha256": hashlib.sha256(canonical(body)).hexdigest()})


def canonical(value: dict[str, Any]) -> bytes:
    """Encode a mapping as canonical JSON, for a manifest and for computing its checksum."""
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def check_version(version: Any, where: str) -> None:
    """Raise CheckpointError if a format version is not VERSION.

    Raises:
        CheckpointError: the version differs. The message states both versions and what to do.
    """
    if version != VERSION:
        raise CheckpointError(
            f"{where} has format version {version!r}, and this version of the runner reads only {VERSION}: load it "
            "with the version of the runner that wrote it, or start a new run in another directory"
        )


def decode(raw: bytes) -> Manifest:
    """Decode and check the content of manifest.json.

    Raises:
        CorruptionError: `raw` differs from what was written.
        CheckpointError: `raw` is intact, but has an unknown format version.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{NAME} is not JSON ({error})") from error
    if not isinstance(body, dict) or "sha256" not in body:
        raise CorruptionError(f"{NAME} contains no checksum of itself")
    checksum = body.pop("sha256")
    if hashlib.sha256(canonical(body)).hexdigest() != checksum or canonical({**body, "sha256": checksum}) != raw:
        raise CorruptionError(f"{NAME} does not match its own checksum")
    check_version(body.get("version"), NAME)
    try:
        return _from_body(body)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptionError(f"{NAME} is incomplete ({type(error).__name__}: {error})") from error


def _from_body(body: dict[str, Any]) -> Manifest:
    records = {
        name: FileRecord(_whole(f"size of {name}", entry["size"]), str(entry["xxh128"]))
        for name, entry in body["files"].items()
    }
    for name in records:
        if name in ("", ".", "..", NAME) or set(name) & set("/\\\0") or not name.isprintable():
            raise CorruptionError(f"{NAME} names the file {name!r}, which is outside the checkpoint")
    manifest = Manifest(**{**body, "files": records})
    for name in ("step", "fence", "world_size"):
        _whole(name, getattr(manifest, name))
    if not isinstance(manifest.fingerprint, dict):
        raise CorruptionError(f"{NAME} has the fingerprint {manifest.fingerprint!r:.80}, which must be a mapping")
    if type(manifest.created) not in (int, float) or not 0 <= manifest.created <= _LARGEST_TIME:
        raise CorruptionError(f"{NAME} has created {manifest.created!r:.80}, which must be seconds since 1970")
    if manifest.metric is not None and type(manifest.metric) not in (int, float):
        raise CorruptionError(f"{NAME} has the metric {manifest.metric!r:.80}, which must be a number")
    if not isinstance(manifest.metric_name, str) or manifest.metric_mode not in BEST_MODES:
        raise CorruptionError(f"{NAME} has the metric {manifest.metric_name!r:.80} by {manifest.metric_mode!r:.80}")
    metric = None if manifest.metric is None else float(manifest.metric)
    return replace(manifest, created=float(manifest.created), metric=metric)


def _whole(what: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise CorruptionError(f"{NAME} has {what} {value!r:.80}, which must be an integer from 0 to 2^62")
    return value


def read(at: Stored) -> Manifest:
    """Read and decode the manifest of a checkpoint. If it seems corrupt, read it a second time.

    Raises:
        CorruptionError: the manifest is missing or differs from what was written.
        CheckpointError: the manifest is not readable, or has an unknown format version.
    """
    return twice(partial(_read, at))


def _read(at: Stored) -> Manifest:
    try:
        raw = _content(at, NAME, _MOST_BYTES)
    except OSError as error:
        raise _missing(NAME, error) from error
    try:
        return decode(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{at.path}: {error}") from error


def is_ours(at: Stored) -> bool:
    """Check whether an entry without an intact manifest is a corrupt checkpoint that this runner wrote.

    Raises:
        CheckpointError: the entry is not readable.
    """
    if TRAIN_STATE in patiently(at.path, at.names):
        return True
    try:
        raw = _content(at, NAME, _MOST_BYTES)
    except OSError:
        return False
    names = [f'"{each.name}"'.encode() for each in fields(Manifest)]
    return sum(name in raw for name in names) > len(names) // 2


def verify(at: Stored, manifest: Manifest) -> None:
    """Verify the sizes and checksums of all files against the manifest. If a file differs, read it a second time.

    Args:
        at: the checkpoint.
        manifest: its manifest.

    Raises:
        CorruptionError: a file is missing, has a different size, or was changed.
        CheckpointError: a file is not readable. This does not mean that it is corrupt.
    """
    for name in sorted(manifest.files):
        twice(partial(_verify_file, at, name, manifest.files[name]))


def twice(check: Callable[[], T]) -> T:
    """Return the result of `check`. If it finds corruption, call it a second time.

    Raises:
        CorruptionError: `check` found corruption both times.
    """
    try:
        return check()
    except CorruptionError:
        return check()


def _verify_file(at: Stored, name: str, expected: FileRecord) -> None:
    try:
        found = patiently(at.path / name, lambda: record_of(at, name, expected.size))
    except OSError as error:
        raise _missing(name, error) from error
    compare(name, found, expected)


def compare(name: str, found: FileRecord, expected: FileRecord) -> None:
    """Compare a file with its entry in the manifest.

    Raises:
        CorruptionError: the size or checksum differs.
    """
    if found.size != expected.size:
        raise CorruptionError(f"{name} has {found.size} bytes, but {expected.size} were written")
    if found.xxh128 != expected.xxh128:
        raise CorruptionError(f"{name} was changed after it was written (its checksum differs)")


def read_verified(at: Stored, name: str, manifest: Manifest) -> bytes:
    """Return the verified content of a checkpoint's file. If it differs from the manifest, read it a second time.

    Raises:
        CorruptionError: the file is missing, has a different size, or was changed.
        CheckpointError: the file is not readable (which does not mean that it is corrupt), or it is not in the
            manifest.
    """
    if name not in manifest.files:
        raise CheckpointError(f"{at.path / name} is refused: it is not in the manifest")
    most = manifest.files[name].size  # no lower limit, because tasks and callbacks may store much in a train state

    def read() -> bytes:
        try:
            raw = _content(at, name, most)
        except OSError as error:
            raise _missing(name, error) from error
        digest = new_hash()
        digest.update(raw)
        compare(name, FileRecord(len(raw), digest.hexdigest()), manifest.files[name])
        return raw

    return twice(read)


@contextmanager
def refusing_corruption(path: Path) -> Iterator[None]:
    """Convert a CorruptionError that the `with` block raises into an error that ends the command.

    Use it for a checkpoint that was already verified when it was chosen.

    Raises:
        CheckpointError: the block raised CorruptionError.
    """
    try:
        yield
    except CorruptionError as error:
        raise CheckpointError(f"{path} is corrupt: {error}") from error


def _content(at: Stored, name: str, most: int) -> bytes:
    """Read a file of at most `most` bytes."""

    def read() -> bytes:
        file, size = at.open(name)
        with file:
            data = file.read(min(size, most) + 1)
        if len(data) > most:
            raise OSError(errno.EFBIG, f"larger than {most} bytes", str(at.path / name))
        return data

    return patiently(at.path / name, read)


def _missing(name: str, error: OSError) -> CorruptionError:
    return CorruptionError(f"{name} cannot be read ({error.strerror})")


def record_of(at: Stored, name: str, expected_size: int | None = None) -> FileRecord:
    """Return the size and XXH3-128 of a file, read in one pass.

    Args:
        at: the checkpoint.
        name: name of the file.
        expected_size: expected size in bytes. A file of a different size is not read, and its checksum stays empty. If
            None, a file of any size is read.

    Raises:
        OSError: the file is missing, not readable, or not a regular file.
    """
    digest, size, buffer = new_hash(), 0, memoryview(bytearray(BLOCK_BYTES))
    file, whole_size = at.open(name)
    with file:
        if expected_size not in (None, whole_size):
            return FileRecord(whole_size, "")
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())
