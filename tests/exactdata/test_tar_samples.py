"""Tar files as map-style sources: each member equals the tar's, and an error in a file is reported with its place."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from loading import identity
from resume import assert_resumes_exactly

from exactdata import ElasticSampler, StatefulDataLoader, tar_samples
from exactdata.errors import DataError
from exactdata.tar_samples import TarSamples, split_name

LONG = "deep/" * 30 + "ünï"  # more than a header holds


def write(file: Path, members: Iterable[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(file, "w", format=form) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file


def samples(first: int, count: int = 9) -> list[tuple[str, bytes]]:
    """Return members with an empty one, a dot in a folder, and names too long for a header."""
    names = [("a.b/x", LONG)[number % 2] + f"{number:03}" for number in range(first, first + count)]
    parts = {".jpg": b"\xff" * 700, ".Seg.PNG": b"", ".cls": b"1"}
    return [(name + end, name.encode() * len(part) + part) for name in names for end, part in parts.items()]


def two(tmp_path: Path) -> list[Path]:
    forms = [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
    return [write(tmp_path / f"{part}.tar", samples(9 * part), form) for part, form in enumerate(forms)]


def source(tmp_path: Path, paths: Any = None, **options: Any) -> TarSamples:
    return TarSamples(paths or tmp_path, cache_dir=tmp_path / "cache", **options)


def test_every_member_is_that_of_the_tar_in_any_order(tmp_path: Path) -> None:
    two(tmp_path)
    data = source(tmp_path)
    expected: dict[str, dict[str, Any]] = {}
    for file in sorted(tmp_path.glob("*.tar")):
        with tarfile.open(file) as archive:
            for member in archive:
                key, _, extension = member.name.replace("a.b/", "a_b/").partition(".")
                key, content = key.replace("a_b/", "a.b/"), archive.extractfile(member)
                assert content is not None
                expected.setdefault(key, {"__key__": key})[extension.lower()] = content.read()
    whole = list(expected.values())
    assert len(data) == len(whole) == 18
    assert [data[index] for index in reversed(range(18))] == whole[::-1]
    again = pickle.loads(pickle.dumps(data))
    assert again[11] == whole[11]
    for index in (-1, 18):
        with pytest.raises(IndexError, match=r"outside \[0, 18\)"):
            data[index]


@pytest.mark.parametrize(
    ("name", "key", "extension"),
    [
        ("0001.jpg", "0001", "jpg"),
        ("./a.b/0001.seg.PNG", "./a.b/0001", "seg.png"),
        ("a/README", "a/README", ""),
        ("a/.hidden", "a/.hidden", ""),
        ("0001.", "0001", ""),
    ],
)
def test_a_key_ends_at_the_first_dot_of_the_last_part(name: str, key: str, extension: str) -> None:
    assert split_name(name) == (key, extension)


def test_the_headers_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = two(tmp_path)
    data = source(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tar_samples, "members", None)
        assert source(tmp_path).fingerprint() == data.fingerprint()
    for index in (tmp_path / "cache").iterdir():
        index.write_bytes(index.read_bytes()[:-8])  # a damaged one is made again
    assert source(tmp_path)[3] == data[3]
    write(first, samples(0)[:-3])
    assert len(source(tmp_path)) == 17


def test_fingerprint_follows_the_content_not_the_size(tmp_path: Path) -> None:
    one, copy, other = (tmp_path / name for name in ("1.tar", "2.tar", "3.tar"))
    write(one, [("a.txt", b"one"), ("b.txt", b"two")])
    copy.write_bytes(one.read_bytes())
    write(other, [("a.txt", b"one"), ("b.txt", b"owt")])
    prints = [source(tmp_path, file).fingerprint() for file in (one, copy, other)]
    assert prints[0] == prints[1] != prints[2]


def text(sample: dict[str, Any]) -> tuple[str, str]:
    return sample["__key__"], sample["cls"].decode()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_gives_the_samples_of_an_uninterrupted_run(tmp_path: Path, workers: int) -> None:
    two(tmp_path)

    def make() -> Any:
        data = source(tmp_path, decode=text)
        sampler = ElasticSampler({"tar": len(data)}, [1], global_batch_size=4)
        return StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=workers, collate_fn=identity)

    batches = assert_resumes_exactly(make, [1, 2], total=4)
    assert len({sample for batch in batches for sample in batch}) == 16


def test_an_error_in_a_tar_file_is_reported_with_its_place(tmp_path: Path) -> None:
    good = write(tmp_path / "good.tar", [("a.jpg", b"x" * 600), ("a.cls", b"1"), ("b.jpg", b"y")]).read_bytes()
    assert len(good) == 10240

    def refused(content: bytes, message: str) -> None:
        file = tmp_path / "bad.tar"
        file.write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            source(tmp_path, file)
        assert str(file) in str(caught.value)

    refused(good[:800], "truncated: at byte 0 'a.jpg' has 600 bytes, of which 288 are there")
    refused(good[:1800], "it ends at byte 1800 without an end mark")
    refused(good[:3584], "ends at byte 3584 without an end mark")
    refused(good[:1536] + b"?" * 512 + good[2048:], "what follows byte 1536 is not the end")
    refused(good + good, "byte 3584 is not the end of a tar file: copy it again, or if files were concatenated")
    refused(b"", "no tar header can be read after byte 0")
    refused(bytes(10240), "has no members with an extension in 10240 bytes")
    refused(b"\x1f\x8b" + good, r"is compressed.*gzip -d")
    refused(b"\x28\xb5\x2f\xfd" + good, r"is compressed.*zstd -d")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (["a.jpg", "a.cls", "a.jpg"], "at byte 2048 'a.jpg' belongs to a sample that already has this extension"),
        (["a.jpg", "b.jpg", "a.cls"], "at byte 2048 'a.cls' belongs to a sample that already ended"),
    ],
)
def test_members_that_no_sample_can_have_are_refused(tmp_path: Path, members: list[str], message: str) -> None:
    file = write(tmp_path / "bad.tar", [(name, b"x") for name in members])
    with pytest.raises(DataError, match=message):
        source(tmp_path, file)


def test_a_link_is_refused_instead_of_lost(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        link = tarfile.TarInfo("a.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "b.jpg"
        archive.addfile(link)
    with pytest.raises(DataError, match="is a link, sparse or no file"):
        source(tmp_path)


def test_a_file_that_changes_while_it_is_used_is_refused(tmp_path: Path) -> None:
    first, _ = two(tmp_path)
    data = source(tmp_path)
    write(first, samples(0)[:-3])
    with pytest.raises(DataError, match="has changed since it was opened"):
        data[0]
