"""Each change to the file system by a load, save, commit or deletion: killed at it, refused, lost or delayed.

A change is lost in a power failure, or delayed until a newer attempt has taken over.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Toy, manager, names
from disk import Recording, Tree, recorded, tree_of, write_tree
from faults import failing, failing_from, intercepted, interrupted, killed

from runner.checkpoint.files import directory as checkpoint_dir
from runner.errors import CheckpointError, SupersededError
from runner.rundir.lease import Lease
from runner.system import files

CODES = [
    errno.ENOSPC,
    errno.EIO,
    errno.ESTALE,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EINTR,
    errno.EMFILE,
]
SAVED = "checkpoints"


class Scene:
    """A run directory with two valid checkpoints, a corrupt newest one, and a leftover of a kill.

    `act` loads (sweeps, sets aside), saves step 3 and deletes step 1.
    """

    fresh = False

    def __init__(self, directory: Path) -> None:
        self.template = directory / "template"
        self.template.mkdir()
        self.digests: dict[int, str] = {}
        self.checked: dict[str, int] = {}
        self.toy = Toy()
        self.prepare(self.template / SAVED)

    def prepare(self, saved: Path) -> None:
        saving = manager(saved)
        for step in (1, 2, 3):
            self.toy.train()
            self.digests[step] = self.toy.digest()
            self.toy.save(saving)
        os.truncate(saved / "step_00000003" / "train_state.pt", 100)
        (saved / "step_00000003.tmp-1-77").mkdir()
        (saved / "step_00000003.tmp-1-77" / "part").write_text("x")

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.template, to))

    def act(self, run: Path, **options: Any) -> bool:
        other = Toy(seed=1)
        working = manager(run / SAVED, keep_last=2, **options)
        working.load(other.model, other.optimizer)
        return self.toy.save(working)

    def check(self, run: Path, case: object) -> int:
        """Check any state: the newest checkpoint loads bit for bit, the next save works, no leftovers remain.

        Returns the step that was loaded (0: there is none).
        """
        key = digest(tree_of(run))
        if key in self.checked:
            return self.checked[key]
        toy = Toy(seed=2)
        loading = manager(run / SAVED, keep_last=2)
        state = loading.load(toy.model, toy.optimizer)
        step = int(state["step"]) if state is not None else 0
        assert step in ((0, 3) if self.fresh else (2, 3)), case
        assert step == 0 or toy.digest() == self.digests[step], case
        assert step == 0 or not checkpoint_dir.leftovers(run / SAVED), case
        toy.step = 4
        assert toy.save(loading), (case, loading.last_error)
        assert loading.newest().step == 4, case  # type: ignore[union-attr]
        kept = ["step_00000004"] if step == 0 else [f"step_{step:08d}", "step_00000004"]
        assert [name for name in names(run / SAVED) if "corrupt" not in name] == kept, case
        self.checked[key] = step
        return step

    def record(self, run: Path) -> tuple[Recording, int]:
        """Record each change of `act`, and the number of changes after which step 3 must stay."""
        with recorded(self.copy(run)) as recording:
            assert self.act(run)
        commit = next(n for n, c in enumerate(recording.changes) if c.to == f"{SAVED}/step_00000003")
        syncs = [n for n, c in enumerate(recording.changes) if n > commit and c.kind == "sync"]
        return recording, min(syncs, default=len(recording.changes) - 1) + 1


class FreshScene(Scene):
    """The first save of a run: not even the directory of checkpoints exists."""

    fresh = True

    def prepare(self, saved: Path) -> None:
        self.toy.train(3)
        self.digests[3] = self.toy.digest()


@pytest.fixture(scope="module", params=[Scene, FreshScene], ids=["later", "first"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    made: Scene = request.param(tmp_path_factory.mktemp("scene"))
    made.act(made.copy(tmp_path_factory.mktemp("warm") / "run"))  # import first, so that imports are not counted
    return made


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in memory if possible: hundreds of commits need not wait for a disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def each(directory: Path) -> Iterator[Path]:
    """Yield fresh directories; each is removed when the next is requested."""
    for number in itertools.count():
        yield directory / str(number)
        shutil.rmtree(directory / str(number), ignore_errors=True)


def test_the_recorded_changes_agree_with_real_kills(scene: Scene, fast: Path) -> None:
    """Compare a few real kills with the model."""
    recording, _ = scene.record(fast / "run")
    assert tree_of(fast / "run") == recording.after_kill(len(recording.changes))
    for number in range(3, len(recording.changes), 15):
        run = scene.copy(fast / str(number))
        _, status = os.waitpid(forked(lambda run=run, number=number: struck(scene, run, number)), 0)  # type: ignore[misc]
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert shape(tree_of(run)) == shape(recording.after_kill(number)), recording.changes[number]


def struck(scene: Scene, run: Path, number: int) -> None:
    with intercepted(killed(number)):
        scene.act(run)


def forked(action: Callable[[], object]) -> int:
    """Run `action` in a forked child that exits without cleaning up; return its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(1)
    return pid


def digest(tree: Tree) -> str:
    """Return the SHA-256 of names and contents."""
    sha = hashlib.sha256()
    for path, content in sorted(tree.items()):
        sha.update(f"{path}\0{-1 if content is None else len(content)}\0".encode() + (content or b""))
    return sha.hexdigest()


def shape(tree: Tree) -> list[tuple[str, str]]:
    """Return names, without process ids, and which files are empty."""
    return sorted(
        (re.sub(r"\.tmp-[^/]*", ".tmp", path), "directory" if content is None else "data" if content else "empty")
        for path, content in tree.items()
    )


def test_the_order_of_a_commit_survives_a_power_loss(scene: Scene, fast: Path) -> None:
    """Sync each file after its last write, then their directory, then rename; then sync the parent.

    The manifest is written last, and an old checkpoint is deleted after all this.
    """
    recording, acknowledged = scene.record(fast / "run")
    changes = recording.changes[:acknowledged]
    commit = next(n for n, change in enumerate(changes) if change.to == f"{SAVED}/step_00000003")
    temporary = changes[commit].path
    last = {c.path: (n, c.kind) for n, c in enumerate(changes[:commit]) if Path(c.path).is_relative_to(temporary)}
    assert {kind for _, kind in last.values()} == {"sync"}
    order = [Path(path).name for path in sorted(last, key=lambda path: last[path][0])]
    assert sorted(order[:-2]) == ["rank_00000.safetensors", "tensors.json", "train_state.pt"]
    assert order[-2:] == ["manifest.json", Path(temporary).name]
    assert (changes[commit + 1].kind, changes[commit + 1].path) == ("sync", SAVED)
    deleted = [n for n, c in enumerate(recording.changes) if c.kind == "rename" and c.path.endswith("step_00000001")]
    assert all(n >= acknowledged for n in deleted)
    assert len(deleted) == (0 if scene.fresh else 1)


def resume_from_kills(scene: Scene, fast: Path) -> None:
    recording, acknowledged = scene.record(fast / "run")
    runs = each(fast / "states")
    (fast / "states").mkdir()
    for number in range(len(recording.changes) + 1):
        change = recording.changes[number] if number < len(recording.changes) else None
        step = scene.check(write_tree(next(runs), recording.after_kill(number)), ("killed", number, change))
        assert step == 3 or number < acknowledged, (number, change)
        if change is not None and change.kind == "write":
            scene.check(write_tree(next(runs), recording.after_kill(number, torn=True)), ("torn", number, change))


def resume_from_power_failures(scene: Scene, fast: Path) -> int:
    recording, acknowledged = scene.record(fast / "run")
    runs = each(fast / "states")
    (fast / "states").mkdir()
    seen = set()
    for number in range(len(recording.changes) + 1):
        for tree in recording.after_power_failure(number):
            key = (digest(tree), number >= acknowledged)
            if key in seen:
                continue
            seen.add(key)
            case = (number, recording.changes[:number][-3:], shape(tree))
            step = scene.check(write_tree(next(runs), tree), case)
            assert step == 3 or number < acknowledged, case
    return len(seen)


def test_killed_before_in_and_after_each_change(scene: Scene, fast: Path) -> None:
    resume_from_kills(scene, fast)


@pytest.mark.promise("power lost at each write of a save: the newest checkpoint loads bit for bit")
def test_the_worst_that_a_power_failure_leaves_at_each_change(tmp_path: Path, fast: Path) -> None:
    """Load the newest committed checkpoint, whatever else was lost."""
    for kind, more_than in ((Scene, 80), (FreshScene, 20)):
        made, kept = tmp_path / kind.__name__, fast / kind.__name__
        made.mkdir()
        kept.mkdir()
        assert resume_from_power_failures(kind(made), kept) > more_than


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", ["files", SAVED, "run", "step_00000003"])
def test_the_model_notices_a_sync_that_is_forgotten(
    fast: Path, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Omit the sync of files, checkpoint directories, the run directory or the checkpoint's own directory."""
    (fast / "scene").mkdir()
    scene = FreshScene(fast / "scene")
    real = files.fsync_dir

    def fsync_dir(directory: Path) -> None:
        if not directory.name.startswith(forgotten):
            real(directory)

    def fsync_fd(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.fsync(fd)

    monkeypatch.setattr(files, "fsync_dir", fsync_dir)
    if forgotten == "files":
        monkeypatch.setattr(files, "fsync_fd", fsync_fd)
    with pytest.raises((AssertionError, CheckpointError)):
        resume_from_power_failures(scene, fast)


@pytest.mark.slow
@pytest.mark.parametrize("code", CODES, ids=lambda code: errno.errorcode[code])
def test_each_change_is_refused(scene: Scene, fast: Path, code: int, caplog: pytest.LogCaptureFixture) -> None:
    """Refuse it once: the error is logged, existing files are untouched, and the next save works.

    With one of the errors per change, also refuse all changes from then on.
    """
    recording, _ = scene.record(fast / "count")
    runs = each(fast / "runs")
    (fast / "runs").mkdir()
    for number, change in enumerate(recording.changes):
        for stays in (False, True):
            if stays and code != CODES[number % len(CODES)]:
                continue
            run = scene.copy(next(runs))
            caplog.clear()
            case = (number, change, stays)
            refused = failing_from(number, code) if stays else failing(number, code)
            before = {} if scene.fresh else tree_of(run / SAVED / "step_00000002")
            with intercepted(refused):
                committed = scene.act(run)
            assert caplog.messages or change.kind == "nothing", case
            assert ({} if scene.fresh else tree_of(run / SAVED / "step_00000002")) == before, case
            step = scene.check(run, case)
            assert step == 3 or not committed, case


@pytest.mark.slow
def test_superseded_attempt_that_wakes_early_changes_nothing(scene: Scene, fast: Path) -> None:
    """Stop it before each change of its load and save; a newer attempt takes over, loads and saves.

    When it wakes, it commits, deletes and sets aside nothing: not one byte differs. Before its save begins, it may find
    the newer attempt's save, and have nothing to do.
    """
    changes = scene.record(fast / "count")[0].changes
    before = next(n for n, change in enumerate(changes) if change.kind == "create")
    runs = each(fast / "runs")
    (fast / "runs").mkdir()
    for number, change in enumerate(changes):
        run = scene.copy(next(runs))
        older = Lease.acquire(run / "lease", {"job_id": "1", "restart_count": 0}, 5.0)
        quiet(older)
        left: list[Tree] = []

        def newer(run: Path = run, left: list[Tree] = left) -> None:
            with Lease.acquire(run / "lease", {"job_id": "1", "restart_count": 1}, 5.0) as lease:
                scene.act(run, check_fence=lease.check_fence, fence=lease.fence)
                left.append(tree_of(run / SAVED))

        with intercepted(interrupted(number, newer)), suppress(SupersededError):
            assert scene.act(run, check_fence=older.check_fence, fence=older.fence) == (number < before), (
                number,
                change,
            )
        assert left, (number, change)
        assert tree_of(run / SAVED) == left[0], (number, change)
        scene.check(run, (number, change))


def quiet(lease: Lease) -> None:
    """End the heartbeat of a lease, so that it is not among the counted changes."""
    assert lease._thread is not None
    lease._stop.set()
    lease._thread.join()
