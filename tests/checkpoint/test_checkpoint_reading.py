"""Read errors condemn no checkpoint: reads are retried, and if they keep failing, the run stops and changes nothing."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Toy, manager, names, train
from faults import reads_intercepted
from test_checkpoint_corruption import flip

from runner.checkpoint.files import choice
from runner.checkpoint.files.directory import Directory, Folder
from runner.checkpoint.files.manifest import Manifest, record_of
from runner.checkpoint.files.reading import PAUSES_S, newest_step
from runner.checkpoint.tensors.layout import INDEX, Part, file_name, header, index
from runner.checkpoint.tensors.reader import CheckpointReader
from runner.errors import CheckpointError
from runner.rundir.paths import RunDir
from runner.system import clock, files

CODES = [errno.EIO, errno.ESTALE, errno.EINTR, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ETIMEDOUT]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """Save two checkpoints, of steps 1 and 2; return what each holds."""
    directory = tmp_path_factory.mktemp("saved")
    return directory, train(directory, 2)


@pytest.fixture
def run(saved: tuple[Path, dict[int, str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses without making them."""
    made: list[float] = []
    monkeypatch.setattr(clock, "sleep", made.append)
    return made


def load(directory: Path) -> Toy:
    toy = Toy(seed=3)
    state = manager(directory).load(toy.model, toy.optimizer)
    assert state is not None
    toy.step = state["step"]
    return toy


def test_each_read_of_a_load_may_fail_once_with_any_error(
    saved: tuple[Path, dict[int, str]], run: Path, pauses: list[float]
) -> None:
    """Refuse each listing, stat, opening and read of a load once: the newest checkpoint is loaded all the same."""
    with reads_intercepted() as trace:
        load(run)
    assert {call for call, _ in trace.calls} >= {"open", "read", "list", "stat"}
    for number in range(trace.count):
        code = CODES[number % len(CODES)]
        pauses.clear()
        with reads_intercepted({number: code}) as broken:
            toy = load(run)
        case = (number, errno.errorcode[code], broken.calls[number])
        assert (toy.step, toy.digest()) == (2, saved[1][2]), case
        assert names(run) == ["step_00000001", "step_00000002"], case
        assert pauses in ([PAUSES_S[0]], []), case  # Python itself reads again after EINTR


@pytest.mark.parametrize("code", CODES)
def test_transient_error_is_survived_and_a_lasting_one_named(run: Path, code: int) -> None:
    with reads_intercepted({0: code}):
        assert load(run).step == 2
    with reads_intercepted(stays=(code, "step_00000002")), pytest.raises(CheckpointError) as caught:
        load(run)
    assert "step_00000002" in str(caught.value)
    assert errno.errorcode[code] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(run) == ["step_00000001", "step_00000002"]
    assert load(run).step == 2


@pytest.mark.parametrize("name", ["tensors.json", "rank_00000.safetensors", "manifest.json", "train_state.pt"])
def test_lasting_error_in_any_file_sets_nothing_aside(run: Path, name: str) -> None:
    """The previous checkpoint and step 0 are not used instead. Saves, lists and retention don't call it corrupt."""
    with reads_intercepted(stays=(errno.EIO, f"step_00000002/{name}")):
        for _ in range(2):
            with pytest.raises(
                CheckpointError, match=rf"step_00000002/{name} cannot be read \(Input/output error, EIO"
            ):
                load(run)
        with pytest.raises(CheckpointError, match="EIO"):
            manager(run).newest()
        toy = Toy()
        toy.step = 2
        saving = manager(run, keep_last=1)
        assert not toy.save(saving)
        assert "EIO" in str(saving.last_error)
        toy.step = 3
        assert toy.save(saving)
        assert RunDir(run.parent).checkpoint_steps()[-1] == 3
    kept = ["step_00000002"] if name == "manifest.json" else []  # an unreadable checkpoint is not deleted either
    assert names(run) == [*kept, "step_00000003"]


def test_an_error_late_in_a_load_is_survived(saved: tuple[Path, dict[int, str]], run: Path) -> None:
    """Fail while tensors are read, after the verification."""
    with reads_intercepted() as trace:
        load(run)
    last = max(n for n, (call, path) in enumerate(trace.calls) if call == "read" and path.endswith("safetensors"))
    with reads_intercepted({last: errno.ESTALE}):
        assert load(run).digest() == saved[1][2]
    with (
        reads_intercepted({last + extra: errno.ESTALE for extra in range(99)}),
        pytest.raises(CheckpointError, match=r"rank_00000.safetensors cannot be read \(.*ESTALE"),
    ):
        load(run)


def test_bytes_are_judged_only_after_a_second_look(run: Path) -> None:
    """A read that returned other bytes once, from a bad cache or network, is no corruption."""
    path = run / "step_00000002" / "rank_00000.safetensors"
    original = path.read_bytes()
    flip(path)
    with reads_intercepted(after={str(path): lambda: path.write_bytes(original)}):
        assert load(run).step == 2
    flip(path)
    assert load(run).step == 1
    assert names(run) == ["step_00000001", "step_00000002.corrupt"]


def test_checkpoint_deleted_during_listing_is_not_corrupt(run: Path, monkeypatch: Any) -> None:
    original = os.listdir

    def listdir(path: Any) -> list[str]:
        found = original(path)
        if Path(path) == run:
            shutil.rmtree(run / "step_00000001", ignore_errors=True)
        return found

    from runner.system import files

    monkeypatch.setattr(files, "list_dir", listdir)
    assert [candidate.step for candidate in choice.candidates(Directory(run))] == [2]


def test_more_ranks_may_have_saved_than_files_may_be_open(tmp_path: Path) -> None:
    """One rank reads the files of all ranks; many systems allow 1,024 open files."""
    ranks = 120
    parts = [[Part("model.w", torch.int64, (ranks,), (rank,), (1,))] for rank in range(ranks)]
    contents = {file_name(rank): header(own) + struct.pack("<q", rank) for rank, own in enumerate(parts)}
    contents[INDEX] = index(parts)
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    manifest = Manifest(1, {name: record_of(Folder(tmp_path), name) for name in contents})
    limits, in_use = resource.getrlimit(resource.RLIMIT_NOFILE), set(map(int, os.listdir("/proc/self/fd")))
    allowed = [number for number in range(1000) if number not in in_use][80]
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, limits[1]))
    try:
        with CheckpointReader(Folder(tmp_path), manifest) as reader:
            found = torch.zeros(ranks, dtype=torch.int64)
            reader.want("model.w", found, (0,))
            reader.fetch(contents)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found.tolist() == list(range(ranks))


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("rows", [3, 32, 300])
def test_a_part_is_read_into_memory_of_any_layout(tmp_path: Path, rows: int, verified: bool) -> None:
    """Read columns, whole rows into a transposed target, and another dtype.

    Pieces are small, large, and just large enough to be read directly into the target (256 KiB).
    """
    columns = 1024
    part = Part("model.w", torch.int64, (rows, columns), (0, 0), (rows, columns))
    whole = torch.arange(rows * columns).reshape(rows, columns)
    contents = {file_name(0): header([part]) + whole.numpy().tobytes(), INDEX: index([[part]])}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    manifest = Manifest(1, {name: record_of(Folder(tmp_path), name) for name in contents})
    plain, transposed = torch.zeros(rows, columns, dtype=torch.int64), torch.zeros(columns, rows, dtype=torch.int64).T
    some, other = torch.zeros(rows, 7, dtype=torch.int64), torch.zeros(rows, columns, dtype=torch.float64)
    with CheckpointReader(Folder(tmp_path), manifest) as reader:
        for target, offsets in ((plain, (0, 0)), (transposed, (0, 0)), (some, (0, 990)), (other, (0, 0))):
            reader.want("model.w", target, offsets)
        reader.fetch(contents if verified else ())
    assert torch.equal(plain, whole)
    assert torch.equal(transposed, whole)
    assert torch.equal(some, whole[:, 990:997])
    assert torch.equal(other, whole.double())


@pytest.mark.parametrize("persists", [False, True])
def test_which_step_is_the_newest_is_asked_again(
    persists: bool, run: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk refuses every time, that is one line, not a traceback."""
    list_dir = files.list_dir

    def refuse(path: Path) -> list[str]:
        if persists or not pauses:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return list_dir(path)

    monkeypatch.setattr(files, "list_dir", refuse)
    if persists:
        with pytest.raises(CheckpointError, match="cannot be read"):
            newest_step(RunDir(run.parent))
    else:
        assert newest_step(RunDir(run.parent)) == 2
    assert pauses == list(PAUSES_S if persists else PAUSES_S[:1])
