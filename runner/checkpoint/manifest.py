"""The manifest of a checkpoint: what belongs to it, and proof that it is all there, unchanged.

Written last, so that a directory without one is no checkpoint. It is canonical JSON and holds a checksum
of itself: every changed byte of it shows. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import CheckpointError

NAME = "manifest.json"
VERSION = 2
READABLE = (1, 2)
"""Format versions that this code reads; older ones by `runner.checkpoint.migrations`."""

CHUNK = 1 << 20


class DamagedError(Exception):
    """A checkpoint that is not what was committed; the message says in what."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint without opening it.

    `step`: optimizer steps complete. `fence`: number of the incarnation that wrote it. `fingerprint`:
    what a run must agree in to load it. `metric`: what "best" is judged by, lower is better.
    `world_size`: ranks that saved it. `created`: seconds since 1970, for people; nothing depends on it.
    """

    step: int
    files: dict[str, FileRecord]
    version: int = VERSION
    fence: int = 0
    fingerprint: dict[str, Any] = field(default_factory=dict)
    metric: float | None = None
    world_size: int = 1
    created: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(record.size for record in self.files.values())

    def encode(self) -> bytes:
        """The bytes of manifest.json."""
        body = asdict(self)
        return _canonical({**body, "sha256": hashlib.sha256(_canonical(body)).hexdigest()})


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def decode(raw: bytes) -> Manifest:
    """The manifest in `raw`.

    Raises:
        DamagedError: it is not as it was written.
        CheckpointError: it is whole, but of a format version that this code does not know.
    """
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise DamagedError(f"{NAME} is no JSON ({error})") from error
    if not isinstance(body, dict):
        raise DamagedError(f"{NAME} holds no object")
    version = body.get("version")
    checksum = body.pop("sha256", None)
    if checksum is None and version != 1:
        raise DamagedError(f"{NAME} holds no checksum of itself")
    if checksum is not None and (
        hashlib.sha256(_canonical(body)).hexdigest() != checksum or _canonical({**body, "sha256": checksum}) != raw
    ):
        raise DamagedError(f"{NAME} does not match its own checksum")
    if version not in READABLE:
        raise CheckpointError(
            f"format version {version!r} is unknown: this code reads {READABLE[0]} to {READABLE[-1]}; "
            "use the version of the runner that wrote it"
        )
    try:
        return _from_body(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{NAME} is incomplete ({type(error).__name__}: {error})") from error


def _from_body(body: dict[str, Any]) -> Manifest:
    files = {name: FileRecord(int(entry["size"]), str(entry["sha256"])) for name, entry in body["files"].items()}
    for name in files:
        if not is_plain(name):
            raise DamagedError(f"{NAME} names the file {name!r}, which is outside of the checkpoint")
    known = {key: body[key] for key in Manifest.__dataclass_fields__ if key in body and key != "files"}
    manifest = Manifest(files=files, **known)
    if not isinstance(manifest.step, int) or manifest.step < 0:
        raise DamagedError(f"{NAME} gives the step as {manifest.step!r}")
    return manifest


def is_plain(name: str) -> bool:
    """Whether `name` is a file right in the directory, not a path out of it."""
    return name not in ("", ".", "..", NAME) and "/" not in name and "\\" not in name and "\0" not in name


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory; see `decode`.

    Raises:
        DamagedError: it is missing or not as written.
        CheckpointError: it may not be read, or its format version is unknown.
    """
    try:
        with open(open_regular(directory / NAME), "rb") as file:
            raw = file.read()
    except OSError as error:
        raise _fault(directory / NAME, error) from error
    try:
        return decode(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error


def verify(directory: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """Read every file (of each `parts` in order of name, the `part`-th) and compare size and checksum.

    Raises:
        DamagedError: a file is missing, of another size, or changed.
        CheckpointError: a file may not be read (permission): that is no damage.
    """
    for name in sorted(manifest.files)[part::parts]:
        expected = manifest.files[name]
        try:
            found = record_of(directory / name)
        except OSError as error:
            raise _fault(directory / name, error) from error
        if found.size != expected.size:
            raise DamagedError(f"{name} has {found.size} bytes, {expected.size} were written")
        if found.sha256 != expected.sha256:
            raise DamagedError(f"{name} was changed after it was written (its checksum differs)")


def _fault(path: Path, error: OSError) -> Exception:
    """Damage, or a reason to stop and ask: what may be mended is never set aside as corrupt."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.ELOOP, errno.EISDIR, errno.EINVAL):
        return DamagedError(f"{path.name} cannot be read ({error.strerror})")
    return CheckpointError(f"{path} cannot be read ({error.strerror}); give the permission back and run again")


def open_regular(path: Path) -> int:
    """A descriptor to read a regular file; a link or a device is an OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def record_of(path: Path) -> FileRecord:
    """Size and SHA-256 of a file, read in one pass through a small buffer that stays in the CPU's cache."""
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(CHUNK))
    with open(open_regular(path), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())
