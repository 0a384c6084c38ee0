"""Corruption of every kind is detected, set aside and survived; no code in a checkpoint is ever run."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Toy, manager, names

from runner.checkpoint.files import choice
from runner.checkpoint.files import directory as checkpoint_dir
from runner.checkpoint.files import manifest as manifests
from runner.checkpoint.files.directory import Directory, Folder
from runner.checkpoint.files.store import FileRecord
from runner.checkpoint.tensors.compare import compare_checkpoints
from runner.checkpoint.tensors.state import restore_train_state
from runner.cli.runs import checkpoints as checkpoints_command
from runner.errors import CheckpointError
from runner.system import files

FILES = ["manifest.json", "rank_00000.safetensors", "tensors.json", "train_state.pt"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save two checkpoints, of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("saved")
    toy, saving = Toy(), manager(directory)
    for _ in range(2):
        toy.train()
        toy.save(saving)
    return directory


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def flip(path: Path) -> None:
    """Change a byte in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def load(directory: Path) -> int:
    """Return the step that is loaded."""
    toy = Toy(seed=3)
    state = manager(directory).load(toy.model, toy.optimizer)
    assert state is not None
    return int(state["step"])


def test_corrupt_checkpoint_does_not_displace_a_valid_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk refuses to set it aside. Retention then keeps the checkpoints saved below it."""
    toy, saving = Toy(), manager(tmp_path)
    for steps in (1, 3):
        toy.train(steps)
        toy.save(saving)
    flip(tmp_path / "step_00000004" / "rank_00000.safetensors")

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    again, resumed = Toy(), manager(tmp_path, keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_dir, "_take", refuse)
        assert (resumed.load(again.model, again.optimizer) or {})["step"] == 1
    again.step = 1
    for step in (2, 3):
        again.train()
        assert again.save(resumed)
        assert names(tmp_path) == [f"step_{step:08d}", "step_00000004"]
    assert load(tmp_path) == 3


def test_corrupt_checkpoint_does_not_count_as_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the disk works again, the checkpoint is set aside."""
    toy, saving, take = Toy(), manager(tmp_path), checkpoint_dir._take
    for steps in (1, 3):
        toy.train(steps)
        toy.save(saving)
    flip(tmp_path / "step_00000004" / "rank_00000.safetensors")

    def refuse(path: Path, *others: Any) -> Path:
        if path.name == "step_00000004":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return take(path, *others)

    again, resumed = Toy(), manager(tmp_path, keep_last=2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_dir, "_take", refuse)
        assert (resumed.load(again.model, again.optimizer) or {})["step"] == 1
        again.step = 1
        for steps in (2, 2):
            again.train(steps)
            assert again.save(resumed)
        assert names(tmp_path) == ["step_00000003", "step_00000004", "step_00000005"]
    again.train()
    assert again.save(resumed)
    assert names(tmp_path) == ["step_00000004.corrupt", "step_00000005", "step_00000006"]


@pytest.mark.parametrize("misread", [False, True])
def test_valid_checkpoint_of_a_corrupt_step_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, misread: bool
) -> None:
    """The step was saved again and the disk reported an error after the rename, or the checkpoint was misread once."""
    toy, saving, sync = Toy(), manager(tmp_path), files.fsync_dir
    for steps in (1, 2):
        toy.train(steps)
        toy.save(saving)
    tensors = tmp_path / "step_00000003" / "rank_00000.safetensors"
    flip(tensors)
    again, resumed, refused = Toy(), manager(tmp_path, keep_last=3), [errno.EIO]

    def refuse(path: Path, *others: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def refuse_once(path: Path) -> None:
        if path == tmp_path and (tmp_path / "step_00000003").is_dir() and refused:
            raise OSError(refused.pop(), "Input/output error")
        sync(path)

    with monkeypatch.context() as patch:
        if misread:
            patch.setattr(checkpoint_dir, "_take", refuse)
        assert (resumed.load(again.model, again.optimizer) or {})["step"] == 1
    again.step = 1
    again.train(2)
    if misread:
        flip(tensors)
        assert again.save(resumed)
    else:
        monkeypatch.setattr(files, "fsync_dir", refuse_once)
        assert not again.save(resumed)
        assert not refused
    again.train(2)
    assert again.save(resumed)
    there = ["step_00000001", "step_00000003", "step_00000005"]
    assert names(tmp_path) == (there if misread else [*there[:2], "step_00000003.corrupt", there[2]])
    assert load(tmp_path) == 5


def positions(size: int) -> Iterator[int]:
    """Return both ends of a file, and some offsets between them."""
    yield from {0, 1, size // 7, size // 4, size // 3, size // 2, 2 * size // 3, size - 2, size - 1}


@pytest.mark.parametrize("name", FILES)
def test_changed_byte_is_detected_set_aside_and_survived(
    saved: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    size = (saved / "step_00000002" / name).stat().st_size
    for position in positions(size):
        for change in (0x01, 0x80):
            run = shutil.copytree(saved, tmp_path / f"{position}-{change}")
            raw = bytearray((run / "step_00000002" / name).read_bytes())
            raw[position] ^= change
            (run / "step_00000002" / name).write_bytes(raw)
            assert corruption(run) is not None, f"byte {position} of {name}"
    assert load(run) == 1
    assert names(run) == ["step_00000001", "step_00000002.corrupt"]
    assert "set aside as step_00000002.corrupt" in caplog.messages[0]


@pytest.mark.parametrize("name", ["tensors.json", "train_state.pt"])
def test_the_verified_bytes_are_the_loaded_ones(run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrupt a bit between two reads: if only the first read was verified, it would be loaded."""
    opened, real = [], files.open_regular

    def rotting(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:
            opened.append(path)
            if len(opened) > 1:
                flip(path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(files, "open_regular", rotting)
    assert load(run) == 2
    assert len(opened) == 1


def corruption(run: Path) -> str | None:
    newest = next(c for c in choice.candidates(Directory(run)) if c.path.name == "step_00000002")
    return choice.corruption_of(newest)


def test_every_single_byte_of_the_manifest_matters(saved: Path) -> None:
    raw = (saved / "step_00000002" / "manifest.json").read_bytes()
    manifests.decode(raw)
    for position in range(len(raw)):
        for change in (0x01, 0x20, 0x80):
            changed = bytearray(raw)
            changed[position] ^= change
            with pytest.raises(manifests.CorruptionError):
                manifests.decode(bytes(changed))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0.0, 0.5, -1])
def test_a_truncated_file_is_detected(run: Path, name: str, keep: float) -> None:
    path = run / "step_00000002" / name
    size = path.stat().st_size
    os.truncate(path, size - 1 if keep < 0 else int(size * keep))
    assert load(run) == 1


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_detected(run: Path, name: str) -> None:
    (run / "step_00000002" / name).unlink()
    assert load(run) == 1


def test_a_file_that_grew_is_detected(run: Path) -> None:
    with open(run / "step_00000002" / "rank_00000.safetensors", "ab") as file:
        file.write(b"x")
    assert load(run) == 1


def test_a_zeroed_manifest_is_corruption(run: Path) -> None:
    shutil.copytree(run / "step_00000002", run / "step_00000008")
    (run / "step_00000008" / "manifest.json").write_bytes(bytes(500))
    assert load(run) == 2
    assert names(run) == ["step_00000001", "step_00000002", "step_00000008.corrupt"]


def test_second_corrupt_checkpoint_of_a_step_is_renamed_apart(run: Path) -> None:
    (run / "step_00000002.corrupt").mkdir()
    (run / "step_00000002" / "train_state.pt").unlink()
    load(run)
    assert names(run) == ["step_00000001", "step_00000002.corrupt", "step_00000002.corrupt-2"]


def test_run_with_only_corrupt_checkpoints_stops_every_time(run: Path) -> None:
    for step in (1, 2):
        (run / f"step_0000000{step}" / "train_state.pt").unlink()
    for words in ("train_state.pt cannot be read", "set aside earlier"):
        with pytest.raises(CheckpointError, match=words) as caught:
            load(run)
        assert "\n" not in str(caught.value)
        assert "start again from step 0" in str(caught.value)


def test_newest_changes_nothing(run: Path) -> None:
    (run / "step_00000002" / "train_state.pt").unlink()
    newest = manager(run).newest()
    assert newest is not None
    assert newest.step == 1
    assert names(run) == ["step_00000001", "step_00000002"]


def test_missing_permission_is_not_corruption(run: Path, monkeypatch: Any) -> None:
    """An unreadable checkpoint is not set aside, since its owner can fix that."""
    original = files.open_fd

    def refuse(path: Any, *rest: Any, **options: Any) -> int:
        if str(path).endswith("step_00000002/train_state.pt"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *rest, **options)

    monkeypatch.setattr(files, "open_fd", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        load(run)
    assert names(run) == ["step_00000001", "step_00000002"]


# What an attacker may write. Manifests below verify: whoever can change a file can change the manifest.


class Trap:
    """A class that runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def forge(path: Path, **changes: Any) -> None:
    """Write a manifest that matches the files as they are now."""
    files = {name: manifests.record_of(Folder(path), name) for name in os.listdir(path) if name != "manifest.json"}
    manifest = replace(manifests.read(Folder(path)), **{"files": files, **changes})
    (path / "manifest.json").write_bytes(manifest.encode())


def test_a_pickle_in_the_train_state_is_refused_and_not_run(run: Path, tmp_path: Path) -> None:
    torch.save({"step": 2, "trap": Trap(tmp_path / "sprung")}, run / "step_00000002" / "train_state.pt")
    forge(run / "step_00000002")
    with pytest.raises(CheckpointError, match=r"train_state.pt is refused.*mkdir") as caught:
        load(run)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "sprung").exists()
    assert names(run) == ["step_00000001", "step_00000002"]


PICKLES = {
    "a deep key": (b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s.", "nested more than 100 levels deep"),
    "a deep value": (b"\x80\x02" + b"]" * 5001 + b"a" * 5000 + b".", "nested more than 100 levels deep"),
    "a key that repeats itself": (b"\x80\x02})" + b"q\x01h\x01\x86" * 60 + b"K\x01s.", "refer to each other too often"),
    "a list in itself": (b"\x80\x02]q\x01h\x01a.", "contains itself"),
    "a huge number": (b"\x80\x02\x8b\x00\x10\x00\x00" + b"\x01" * 4096 + b".", "an integer of 32761 bits"),
    "no state": (b"\x80\x02K\x01.", "'int' instead of a train state"),
    "no pickle": (b"", "pickle exhausted"),
    "what was never there": (b"\x80\x02h\x05.", "it is not as torch.save writes it"),
}


@pytest.mark.parametrize("case", PICKLES)
def test_train_states_that_break_the_interpreter_are_one_line(run: Path, case: str) -> None:
    """The first of these ends torch.load in a segmentation fault, in any command."""
    pickled, message = PICKLES[case]
    path = run / "step_00000002"
    with zipfile.ZipFile(path / "train_state.pt") as old:
        content = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path / "train_state.pt", "w") as new:
        for name, data in content.items():
            new.writestr(name, pickled if name.endswith("data.pkl") else data)
    forge(path)
    for read in (
        lambda: load(run),
        lambda: compare_checkpoints(Folder(path), Folder(path), (manifests.read(Folder(path)),) * 2),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            read()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("odd", ["x", -1, None, [], {}, ()], ids=repr)
@pytest.mark.parametrize("key", ["rng", "rng_by_rank", "scheduler", "scheduler.last_epoch", "optimizer", "tokens_seen"])
def test_odd_values_in_a_train_state_are_one_line(run: Path, key: str, odd: Any) -> None:
    """Some do no harm: an empty list of generators, for example."""
    path = run / "step_00000002"
    state = torch.load(path / "train_state.pt", weights_only=True)
    outer, _, inner = key.partition(".")
    state[outer] = {**state[outer], inner: odd} if inner else odd
    torch.save(state, path / "train_state.pt")
    forge(path)
    toy = Toy(seed=3)
    with suppress(CheckpointError):
        loaded = manager(run).load(toy.model, toy.optimizer)
        restore_train_state(loaded or {}, toy.scheduler, toy.loader)


NO_INDEX = [
    b"",
    b"[]",
    b"null",
    b'{"files": []}',
    b'{"files": {}, "tensors": []}',
    b'{"files": [], "tensors": {"a": 1}}',
    pickle.dumps({"files": [], "tensors": {}}),
    b"[" * 100_000,
]


@pytest.mark.parametrize("what", NO_INDEX)
def test_an_invalid_index_is_refused_in_one_line(run: Path, what: bytes) -> None:
    path = run / "step_00000002" / "tensors.json"
    path.write_bytes(what)
    forge(path.parent)
    with pytest.raises(CheckpointError, match=r"tensors\.json is refused") as caught:
        load(run)
    assert "\n" not in str(caught.value)


def test_a_pickle_in_place_of_a_tensor_is_not_run(run: Path, tmp_path: Path) -> None:
    """Bytes of a tensor are read as bytes only."""
    path = run / "step_00000002" / "rank_00000.safetensors"
    raw = path.read_bytes()
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    path.write_bytes(raw[: -len(trap)] + trap)
    forge(path.parent)
    assert load(run) == 2
    assert not (tmp_path / "sprung").exists()


WEIGHT = "model.0.weight"  # float32, 8 x 4
OTHER_PLACES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "above": (lambda index: index.update(files=["../../secret.safetensors"]), "which is not a file of the checkpoint"),
    "elsewhere": (lambda index: index.update(files=["/etc/passwd"]), "which is not a file of the checkpoint"),
    "unlisted": (lambda index: index.update(files=["other.safetensors"]), "which is not a file of the checkpoint"),
    "a list": (lambda index: index.update(files=[["rank_00000.safetensors"]]), "TypeError"),
    "beyond the end": (lambda index: chunk_of(index).__setitem__(1, 2**40), "beyond the end"),
    "before the start": (lambda index: chunk_of(index).__setitem__(1, -1), "where sizes should be"),
    "no number": (lambda index: chunk_of(index).__setitem__(1, True), "where sizes should be"),
    "no such file": (lambda index: chunk_of(index).__setitem__(0, 7), "IndexError"),
    "outside of the tensor": (lambda index: chunk_of(index).__setitem__(2, [4, 0]), "a chunk outside of it"),
    "other dimensions": (lambda index: chunk_of(index).__setitem__(3, [32]), "other dimensions"),
    "too few values": (lambda index: chunk_of(index).__setitem__(3, [7, 4]), "values of 'model.0.weight' are missing"),
    "no dtype": (lambda index: index["tensors"][WEIGHT].__setitem__(0, "load"), "has no dtype"),
    "quantized": (lambda index: index["tensors"][WEIGHT].__setitem__(0, "quint8"), "has no dtype"),
    "a value twice": (lambda index: chunks_of(index).append([*chunk_of(index)[:3], [1, 1]]), "are there twice"),
    "one part twice, another never": (
        lambda index: chunks_of(index).__setitem__(slice(None), [[*chunk_of(index)[:3], [4, 4]]] * 2),
        "are there twice",
    ),
    "parts that overlap": (
        lambda index: chunks_of(index).__setitem__(
            slice(None), [[*chunk_of(index)[:2], *part] for part in ([[0, 0], [8, 3]], [[1, 2], [4, 2]])]
        ),
        "are there twice",
    ),
    "a huge shape": (lambda index: index["tensors"][WEIGHT].__setitem__(1, [2**61, 4]), "are missing"),
}


def chunks_of(index: dict[str, Any]) -> Any:
    return index["tensors"][WEIGHT][2]


def chunk_of(index: dict[str, Any]) -> Any:
    return chunks_of(index)[0]


@pytest.mark.parametrize("case", OTHER_PLACES)
def test_an_index_cannot_point_outside(run: Path, case: str) -> None:
    change, message = OTHER_PLACES[case]
    path = run / "step_00000002" / "tensors.json"
    index = json.loads(path.read_bytes())
    change(index)
    path.write_text(json.dumps(index))
    forge(path.parent)
    with pytest.raises(CheckpointError, match=rf"tensors\.json is refused: .*{message}") as caught:
        load(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../step_00000001/train_state.pt", "/etc/passwd", "a/b", "..", "", "manifest.json"])
def test_a_manifest_cannot_name_files_outside(run: Path, name: str) -> None:
    path = run / "step_00000002"
    forge(path, files={name: FileRecord(1, "0")})
    candidate = next(c for c in choice.candidates(Directory(run)) if c.path == path)
    assert candidate.corruption is not None
    assert "outside the checkpoint" in candidate.corruption


ABSURD: dict[str, list[Any]] = {
    "step": [True, -1, 2**62 + 1, 2.0, "2", None],
    "fence": [-1, 2**62 + 1, 10**400, 0.5, None],
    "world_size": [-1, 2**62 + 1, 10**400, "1"],
    "created": [float("nan"), float("inf"), -1.0, 2.0**40 + 1, 1e308, 10**400, "now", None, True],
    "metric": [10**400, "low", [1], True],
    "fingerprint": [None, [], "x"],
    "files": [None, [], {"train_state.pt": {"size": 10**400, "xxh128": "0"}}, {"train_state.pt": {"size": -1}}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ABSURD.items() for value in values])
def test_manifest_with_valid_checksum_may_still_be_malformed(
    run: Path, key: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "step_00000002" / "manifest.json"
    body = {**json.loads(path.read_bytes()), key: value}
    del body["sha256"]
    path.write_bytes(manifests.canonical({**body, "sha256": sha256(manifests.canonical(body)).hexdigest()}))
    for as_json in (True, False):
        assert checkpoints_command.show(run, verify=True, as_json=as_json) == 1
        output = capsys.readouterr().out
        assert "manifest.json" in output
    assert "corrupt: manifest.json " in output
    assert load(run) == 1


def test_a_file_of_another_size_is_not_read(run: Path) -> None:
    """Use a sparse file, which costs nothing to store and a day to read."""
    at = Folder(run / "step_00000002")
    written = manifests.record_of(at, "train_state.pt")
    os.truncate(at.path / "train_state.pt", 2**42)
    assert manifests.record_of(at, "train_state.pt", written.size) == FileRecord(2**42, "")
    assert load(run) == 1


def test_errors_are_found_without_reading_the_files(run: Path) -> None:
    """A list of checkpoints looks at names and sizes alone."""
    (run / "step_00000001" / "manifest.json").write_bytes(b"")
    os.truncate(run / "step_00000002" / "train_state.pt", 3)
    newer, older = choice.candidates(Directory(run))
    assert str(choice.size_error(newer)).startswith("train_state.pt has 3 bytes, but ")
    assert str(choice.size_error(older)).startswith("manifest.json is not JSON")


@pytest.mark.parametrize("name", FILES)
def test_links_are_not_followed(run: Path, tmp_path: Path, name: str) -> None:
    path = run / "step_00000002" / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert load(run) == 1


def test_a_pipe_in_place_of_a_file_does_not_hang(run: Path) -> None:
    path = run / "step_00000002" / "train_state.pt"
    path.unlink()
    os.mkfifo(path)
    assert load(run) == 1


def test_a_directory_that_others_may_write_to_is_warned_about(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    run.chmod(0o775)
    load(run)
    assert len(caplog.messages) == 1
    assert "is writable by its group" in caplog.messages[0]


def test_unknown_format_version_is_refused_not_set_aside(run: Path) -> None:
    forge(run / "step_00000002", version=3)
    with pytest.raises(
        CheckpointError, match="format version 3, and this version of the runner reads only 2: load it with"
    ):
        load(run)
    assert names(run) == ["step_00000001", "step_00000002"]


def test_a_manifest_without_its_checksum_is_corrupt(run: Path) -> None:
    path = run / "step_00000002"
    body = json.loads((path / "manifest.json").read_text())
    del body["sha256"]
    (path / "manifest.json").write_text(json.dumps(body))
    assert load(run) == 1


def test_a_train_state_of_an_unknown_format_version_is_refused(run: Path) -> None:
    path = run / "step_00000002"
    state = torch.load(path / "train_state.pt", weights_only=True)
    torch.save({**state, "version": 9}, path / "train_state.pt")
    forge(path)
    with pytest.raises(CheckpointError, match=r"train_state.pt has format version 9"):
        load(run)


@pytest.mark.parametrize("missing", ["step", "tokens_seen", "rng", "optimizer"])
def test_an_entry_that_is_missing_from_the_train_state_is_named(run: Path, missing: str) -> None:
    path = run / "step_00000002"
    state = torch.load(path / "train_state.pt", weights_only=True)
    del state[missing]
    torch.save(state, path / "train_state.pt")
    forge(path)
    with pytest.raises(CheckpointError, match=f"step_00000002.*{missing}"):
        load(run)
