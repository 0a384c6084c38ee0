"""Check that kills leave every step once in the metrics, and that loggers continue one run and never harm training."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import SupersededError, UserError
from runner.metrics import jsonl, resume_jsonl
from runner.metrics.external import ExternalWriter, scalars
from runner.metrics.jsonl import copy_records
from runner.metrics.lineage import Fork, Lineage, Summary
from runner.metrics.mlflow import MLflow
from runner.metrics.progress import ProgressBar, duration, quantity
from runner.metrics.tensorboard import TensorBoard
from runner.metrics.wandb import WandB
from runner.rundir import evaluations
from runner.rundir.paths import RunDir
from runner.system import files
from runner.system.files import read_lines


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def record(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 8.0 / step, "samples": {"code": step, "prose": 2 * step}, "digest": "ab"}


def write(run: RunDir, first: int, last: int, evaluate: int = 10) -> None:
    with resume_jsonl(run.metrics, first - 1) as writer:
        for step in range(first, last + 1):
            writer.write(record(step))
            if step % evaluate == 0:
                writer.write({"step": step, "eval_loss": 9.0 / step})


def steps(run: RunDir) -> list[int]:
    return [line["step"] for line in read_lines(run.metrics) if "loss" in line]


# ---- metrics.jsonl


def test_a_record_is_in_the_file_as_soon_as_it_is_written(run: RunDir) -> None:
    writer = resume_jsonl(run.metrics, 0)
    writer.write(record(1))
    writer.write({"step": 1, "eval_loss": 0.1 + 0.2})
    assert list(read_lines(run.metrics)) == [record(1), {"step": 1, "eval_loss": 0.1 + 0.2}]
    writer.sync()
    writer.close()
    writer.close()


def test_resuming_keeps_records_up_to_the_step(run: RunDir) -> None:
    write(run, 1, 25)
    assert resume_jsonl(run.metrics, 20).reached == 25
    assert steps(run) == list(range(1, 21))
    assert list(read_lines(run.metrics))[-1] == {"step": 20, "eval_loss": 9.0 / 20}
    write(run, 21, 30)
    assert steps(run) == list(range(1, 31))
    assert resume_jsonl(run.metrics, 30).reached == 30
    assert steps(run) == list(range(1, 31))


def test_an_evaluation_that_will_be_repeated_is_dropped(run: RunDir) -> None:
    """Restore a state saved during an evaluation: the first attempt has already written the record."""
    write(run, 1, 25)
    assert resume_jsonl(run.metrics, 20, evaluated=False).reached == 25
    assert list(read_lines(run.metrics))[-1] == record(20)
    assert resume_jsonl(run.metrics, 20, evaluated=False).reached == 20
    assert list(read_lines(run.metrics))[-1] == record(20)


def test_step_line_that_looks_like_an_evaluation_is_kept(run: RunDir) -> None:
    """Name a source so that a step's record resembles an evaluation. No later attempt would write this line again."""
    with resume_jsonl(run.metrics, 0) as writer:
        for step in (1, 2):
            writer.write({**record(step), "sources": {"eval_books": {"samples": step}}})
        writer.write({"step": 2, "eval_loss": 1.0})
    resume_jsonl(run.metrics, 2, evaluated=False).close()
    assert [line["sources"] for line in read_lines(run.metrics)] == [{"eval_books": {"samples": n}} for n in (1, 2)]


def test_resuming_at_step_0_keeps_nothing(run: RunDir) -> None:
    for _ in ("missing", "empty"):
        assert resume_jsonl(run.metrics, 0).reached == 0
        assert run.metrics.read_bytes() == b""
    write(run, 1, 5)
    assert resume_jsonl(run.metrics, 0).reached == 5
    assert run.metrics.read_bytes() == b""


def test_superseded_process_writes_to_an_abandoned_file(run: RunDir) -> None:
    """Write from a frozen process that still has the old file open when it wakes up."""
    frozen = resume_jsonl(run.metrics, 0)
    frozen.write(record(1))
    resume_jsonl(run.metrics, 1)
    frozen.write(record(999))
    write(run, 2, 3)
    frozen.close()
    assert steps(run) == [1, 2, 3]


@given(last=st.integers(1, 12), cut=st.integers(0, 400), resume=st.integers(0, 12))
def test_a_file_truncated_anywhere_resumes_with_complete_records(
    tmp_path_factory: pytest.TempPathFactory, last: int, cut: int, resume: int
) -> None:
    run = RunDir(tmp_path_factory.mktemp("run"))
    write(run, 1, last, evaluate=3)
    whole = run.metrics.read_bytes()
    run.metrics.write_bytes(whole[: max(0, len(whole) - cut)])
    there = steps(run)
    resume_jsonl(run.metrics, resume)
    assert steps(run) == [step for step in there if step <= resume]
    assert run.metrics.read_bytes() in (b"", whole[: run.metrics.stat().st_size])


def test_garbage_at_the_end_is_dropped(run: RunDir) -> None:
    write(run, 1, 3)
    with open(run.metrics, "ab") as file:
        file.write(b'\0\0\0\0\nnull\n{}\n[1]\n{"step": 1e999}\n' + b"[" * 100_000 + b"\n")
    assert resume_jsonl(run.metrics, 3).reached == 3
    assert steps(run) == [1, 2, 3]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["write_fd", "fsync_fd"])
def test_after_an_error_all_lines_are_written_to_a_new_file(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Reopen the file, because data that an fsync refused may be lost even if a second one succeeds.

    A descriptor may also stay stale for ever.
    """
    writer = resume_jsonl(run.metrics, 0)
    writer.write(record(1))
    before = run.metrics.stat().st_ino

    def refused(*arguments: Any) -> int:
        raise OSError(code, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(files, call, refused)
        with pytest.raises(OSError, match="refused"):
            writer.write(record(2)) if call == "write_fd" else writer.sync()
    monkeypatch.setattr(files, "copy_range", lambda *arguments: pytest.fail("the new file shares what may be lost"))
    writer.write(record(2))
    writer.close()
    assert list(read_lines(run.metrics)) == [record(1), record(2)]
    assert run.metrics.stat().st_ino != before


def test_a_sync_that_failed_once_is_repeated_with_a_new_file(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write nothing in between: the second fsync of the same file may succeed although lines are lost."""
    writer = resume_jsonl(run.metrics, 0)
    writer.write(record(1))
    before = run.metrics.stat().st_ino

    def refused(fd: int) -> None:
        raise OSError(errno.EIO, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(files, "fsync_fd", refused)
        with pytest.raises(OSError, match="refused"):
            writer.sync()
    writer.sync()
    assert run.metrics.stat().st_ino != before
    assert list(read_lines(run.metrics)) == [record(1)]


def test_closing_the_file_makes_records_durable(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the close, because nothing else syncs the file at the end of a run."""
    writer, synced = resume_jsonl(run.metrics, 0), []
    monkeypatch.setattr(files, "fsync_fd", lambda fd: synced.append(list(read_lines(run.metrics))))
    writer.write(record(1))
    assert synced == []
    writer.close()
    assert synced == [[record(1)]]


def test_a_closed_file_holds_no_descriptor(run: RunDir) -> None:
    """Check that a process with several attempts does not run out of descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    writer = resume_jsonl(run.metrics, 0)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    writer.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_branch_copies_records_of_its_trunk_and_drops_others(run: RunDir, tmp_path: Path) -> None:
    """Also check a trunk without the file, and records that an earlier attempt copied from another trunk."""
    branch = RunDir(tmp_path / "branch")
    branch.path.mkdir()
    write(run, 1, 12)
    branch.metrics.write_text("other")
    branch.timings.write_text("other")
    copy_records(branch, run, 7)
    assert steps(branch) == list(range(1, 8))
    assert branch.timings.read_text() == ""
    assert steps(run) == list(range(1, 13))


def test_line_truncated_by_a_full_disk_is_removed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, real, calls = resume_jsonl(run.metrics, 0), files.write_fd, []

    def full(fd: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:7])

    monkeypatch.setattr(files, "write_fd", full)
    with pytest.raises(OSError, match="No space"):
        writer.write(record(1))
    monkeypatch.setattr(files, "write_fd", real)
    writer.write(record(1))
    writer.close()
    assert list(read_lines(run.metrics)) == [record(1)]


def test_lines_lost_by_the_file_system_are_written_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate NFS, which reports a full disk with a later write or with the sync."""
    writer, write, sync = resume_jsonl(run.metrics, 0), files.write_fd, files.fsync_fd
    writer.write(record(1))
    writer.sync()
    durable = [run.metrics.stat().st_size]

    def lose(fd: int, data: bytes = b"") -> int:
        size = os.fstat(fd).st_size
        os.ftruncate(fd, durable[-1])
        if data:  # without data the file would look shorter
            os.ftruncate(fd, size)
        raise OSError(errno.ENOSPC, "No space left on device")

    writer.write(record(2))
    monkeypatch.setattr(files, "write_fd", lose)
    with pytest.raises(OSError, match="No space"):
        writer.write(record(3))
    monkeypatch.setattr(files, "write_fd", write)
    writer.write(record(3))
    writer.sync()
    assert list(read_lines(run.metrics)) == [record(1), record(2), record(3)]
    durable.append(run.metrics.stat().st_size)
    writer.write(record(4))
    monkeypatch.setattr(files, "fsync_fd", lose)
    with pytest.raises(OSError, match="No space"):
        writer.sync()
    monkeypatch.setattr(files, "fsync_fd", sync)
    writer.write(record(5))
    writer.close()
    assert list(read_lines(run.metrics)) == [record(step) for step in range(1, 6)]


def test_memory_for_unsynced_records_is_bounded(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, sync, synced = resume_jsonl(run.metrics, 0), files.fsync_fd, list[int]()
    monkeypatch.setattr(jsonl, "TAIL_BYTES", 1000)

    def synchronize(fd: int) -> None:
        synced.append(fd)
        sync(fd)

    monkeypatch.setattr(files, "fsync_fd", synchronize)
    for step in range(1, 101):
        writer.write(record(step))
        assert len(writer._tail) < 1100
    assert 1 < len(synced) < 10
    writer.close()
    assert list(read_lines(run.metrics)) == [record(step) for step in range(1, 101)]


def test_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, runner.metrics, runner.metrics.external, runner.metrics.tensorboard, runner.metrics.progress;"
        "sys.exit(bool({'torch', 'numpy', 'rich', 'tensorboard', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- loggers


def test_numbers_of_a_record_by_name() -> None:
    assert scalars({"step": 3, "a": 1, "b": {"c": 0.5, "d": {"e": 2}}, "text": "x", "flag": True, "none": None}) == {
        "a": 1.0,
        "b/c": 0.5,
        "b/d/e": 2.0,
    }


def test_tensorboard_shows_one_curve_over_all_attempts(run: RunDir) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, last in ((0, 25), (20, 37), (30, 50)):
        writer = TensorBoard(run, resumed)
        for step in range(resumed + 1, last + 1):
            writer.write(record(step) | {"attempt": resumed})
            writer.write({"step": step, "eval_loss": 1.0})
        writer.flush()
        writer.close()
    events = EventAccumulator(str(run.tensorboard), {"scalars": 0}).Reload()
    for tag in ("loss", "samples/code", "eval_loss"):
        assert [event.step for event in events.Scalars(tag)] == list(range(1, 51))
    assert [event.value for event in events.Scalars("attempt")] == [0.0] * 20 + [20.0] * 10 + [30.0] * 20


@pytest.mark.parametrize("room", [0, 1, 3])
def test_a_full_disk_at_tensorboards_file_is_one_warning(
    run: RunDir, room: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left, really, reported = iter(range(room)), files.write_fd, list[str]()

    def write(fd: int, data: Any) -> int:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really(fd, data)

    monkeypatch.setattr(files, "write_fd", write)
    writer = TensorBoard(run, 0, reported.append)
    for step in range(1, 9):
        writer.write(record(step))
        writer.flush()
    writer.close()
    gc.collect()
    (message,) = reported
    assert "logger tensorboard failed and is disabled from here on" in message
    assert "No space left on device" in message
    assert capfd.readouterr() == ("", "")


class Faulty(ExternalWriter):
    """A logger whose library fails in a chosen method."""

    name = module = package = "json"

    def __init__(self, run: RunDir, fails: str, report: Callable[[str], None]) -> None:
        super().__init__(run, 0, report)
        self.fails = fails
        self.logged: list[int] = []

    def open(self) -> None:
        self._maybe("open")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._maybe("log")
        self.logged.append(step)

    def sync(self) -> None:
        self._maybe("sync")

    def end(self) -> None:
        self._maybe("end")

    def _maybe(self, where: str) -> None:
        if where == self.fails:
            raise ConnectionError("no network\nand a long story")


@pytest.mark.parametrize("looks", [0, 3])
def test_logger_of_a_superseded_attempt_stops_logging(run: RunDir, looks: int) -> None:
    """Log no message either: the training thread detects the lost lease. `end` would send buffered records."""
    left = iter(range(looks))

    def check() -> None:
        if next(left, None) is None:
            raise SupersededError("superseded")

    reported: list[str] = []
    writer = Faulty(RunDir(run.path, files.Guard("lease-00000001", check)), "end", reported.append)
    for step in range(1, 9):
        writer.write(record(step))
    writer.close()
    assert writer.logged == list(range(1, looks))  # the first check is before the library is opened
    assert reported == []


@pytest.mark.parametrize("fails", ["open", "log", "sync", "end"])
def test_a_logger_that_fails_is_reported_once_and_disabled(run: RunDir, fails: str) -> None:
    reported: list[str] = []
    writer = Faulty(run, fails, reported.append)
    for step in range(1, 50):
        writer.write(record(step))
        writer.flush()
    writer.close()
    writer.close()
    assert reported == ["logger json failed and is disabled from here on (ConnectionError: no network)"]


def test_a_working_logger_gets_every_record(run: RunDir) -> None:
    writer = Faulty(run, "", pytest.fail)
    for step in range(1, 200):
        writer.write(record(step))
    writer.close()
    assert writer.logged == list(range(1, 200))


def test_a_hanging_logger_does_not_delay_the_end(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from runner.metrics import external

    monkeypatch.setattr(external, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(external, "QUEUE_RECORDS", 4)
    reported: list[str] = []
    release = threading.Event()
    writer = Faulty(run, "", reported.append)
    monkeypatch.setattr(writer, "log", lambda step, values: release.wait(10))
    for step in range(1, 20):
        writer.write(record(step))
    writer.close()
    release.set()
    assert "4 records are waiting" in reported[0]
    assert "did not finish within 0.05 s" in reported[1]


@pytest.mark.parametrize(("make", "package"), [(WandB, "wandb"), (MLflow, "mlflow")])
def test_a_logger_that_is_not_installed_is_named(
    run: RunDir, make: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"pip install {package}"):
        make(run, 0)


WANDB = """
    import json, pathlib

    class Config(dict):
        def update(self, values, allow_val_change):
            assert allow_val_change
            super().update(values)

    class Run:
        # the service's side of a run: steps only go forward, a resumed one begins after its last
        def __init__(self, id, dir):
            self.file = pathlib.Path(dir) / f"wandb-{id}.jsonl"
            lines = self.file.read_text().splitlines() if self.file.exists() else []
            self.step = json.loads(lines[-1])["step"] + 1 if lines else 0
            self.config, self.summary = Config(), {}

        def log(self, values, step):
            with open(self.file, "a") as file:
                file.write(json.dumps({"step": step, **values}) + "\\n")

        preempting = False

        def mark_preempting(self):
            self.preempting = True

        def finish(self, exit_code):
            ENDS.append((exit_code, self.preempting, dict(self.summary), dict(self.config)))

    ENDS = []
    OPTIONS = []

    def init(id, resume, dir, **options):
        OPTIONS.append(options)
        assert (resume, options["project"], options["mode"]) == ("allow", "mine", "offline")
        return Run(id, dir)
"""


def test_wandb_continues_one_run(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake the library's interface. docs/logging.md describes the library's behavior."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "wandb.py").write_text(textwrap.dedent(WANDB))
    monkeypatch.syspath_prepend(tmp_path / "lib")
    for resumed, last in ((0, 25), (20, 40)):
        writer = WandB(run, resumed, mode="offline", project="mine")
        for step in range(resumed + 1, last + 1):
            writer.write(record(step))
        writer.close()
    monkeypatch.delitem(sys.modules, "wandb")
    (logged,) = run.path.glob("wandb-*.jsonl")
    assert [line["step"] for line in read_lines(logged)] == list(range(1, 41))
    assert json.loads(run.loggers.read_text()) == {"wandb": logged.stem.removeprefix("wandb-")}


MLFLOW = """
    import json, pathlib, types

    class Store(dict):
        pass

    RUNS = {}

    class MlflowClient:
        def __init__(self, uri):
            assert uri == "memory"

        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            return "7"

        def create_run(self, experiment, tags, run_name):
            name = f"r{len(RUNS) + 1}"
            RUNS[name] = {"metrics": [], "status": None, "tags": tags, "params": {}}
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=name))

        def set_tag(self, id, key, value):
            RUNS[id]["tags"][key] = value

        def update_run(self, id, status):
            RUNS[id]["status"] = status

        def get_run(self, id):
            keys = {m.key: m.value for m in RUNS[id]["metrics"]}
            return types.SimpleNamespace(data=types.SimpleNamespace(metrics=keys))

        def get_metric_history(self, id, key):
            return [m for m in RUNS[id]["metrics"] if m.key == key]

        def log_batch(self, id, metrics=(), params=()):
            assert len(metrics) <= 1000 and len(params) <= 100
            RUNS[id]["metrics"] += metrics
            RUNS[id]["params"] |= dict(params)

        def set_terminated(self, id, status):
            RUNS[id]["status"] = status
"""
ENTITIES = """
    import collections
    Metric = collections.namedtuple("Metric", "key value timestamp step")
    Param = collections.namedtuple("Param", "key value")
"""


def test_mlflow_continues_one_run(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake the library's interface. docs/logging.md describes the library's behavior."""
    package = tmp_path / "lib" / "mlflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(MLFLOW))
    (package / "entities.py").write_text(textwrap.dedent(ENTITIES))
    monkeypatch.syspath_prepend(tmp_path / "lib")
    for resumed, last in ((0, 725), (720, 740)):
        writer = MLflow(run, resumed, tracking_uri="memory")
        for step in range(resumed + 1, last + 1):
            writer.write(record(step))
        writer.ending("finished")
        writer.close()
    logged = sys.modules["mlflow"].RUNS
    for name in ("mlflow", "mlflow.entities"):
        monkeypatch.delitem(sys.modules, name)
    assert list(logged) == ["r1"]
    assert logged["r1"]["status"] == "FINISHED"
    for key in ("loss", "samples/code"):
        assert [m.step for m in logged["r1"]["metrics"] if m.key == key] == list(range(1, 741))


# ---- progress


class Screen(io.StringIO):
    """A terminal that remembers its output."""

    def isatty(self) -> bool:
        return True


def clock(step_s: float) -> Callable[[], float]:
    now = iter(range(10**6))
    return lambda: next(now) * step_s


def test_a_log_file_gets_occasional_lines() -> None:
    stream = io.StringIO()
    bar = ProgressBar(100, stream=stream, clock=clock(1.0))
    for step in range(1, 101):
        bar.update(step, 4.0 / step, 96.0, 12_345.0, data_wait=0.034)
    bar.say("step 100: eval loss 1.0")
    bar.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 1/100  loss 4.0000  12.3k tokens/s  ? left"
    assert lines[1] == "step 11/100  loss 0.3636  12.3k tokens/s  1:29 left"
    assert lines[-2] == "step 100/100  loss 0.0400  12.3k tokens/s  0:00 left  data wait 3 %"
    assert lines[-1] == "step 100: eval loss 1.0"
    assert len(lines) == 12


def test_a_terminal_gets_a_bar_and_messages_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    bar = ProgressBar(50, stream=screen, clock=clock(0.03))
    for step in range(11, 51):
        bar.update(step, 1.0, 900.0)  # for images, say, without tokens
        if step == 30:
            bar.say("step 30: [brackets] stay")
    bar.close()
    bar.close()
    shown = screen.getvalue()
    assert "50/50" in shown
    assert "900 samples/s" in shown
    assert "step 30: [brackets] stay" in shown
    assert shown.count("\r") < 40
    assert shown.rstrip().endswith("\x1b[?25h")


def test_numbers_are_short() -> None:
    assert [quantity(n) for n in (7, 999, 1500, 2.5e6, 3e9)] == ["7", "999", "1.5k", "2.5M", "3.0G"]
    assert [duration(s) for s in (None, 5.9, 65, 3725)] == ["?", "0:05", "1:05", "1:02:05"]


class Gone(Screen):
    """A closed terminal."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    flush = property(lambda self: self.write)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_closed_terminal_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Gone()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    bar = ProgressBar(3, stream=screen, clock=clock(1.0))
    for step in (1, 2, 3):
        bar.update(step, 1.0, 900.0)
        bar.say("words")
    bar.close()


# ---- how loggers show forks, resumes and ends


def installed(library: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the fake of wandb or mlflow, newly imported."""
    (library / "mlflow").mkdir(parents=True)
    (library / "wandb.py").write_text(textwrap.dedent(WANDB))
    (library / "mlflow" / "__init__.py").write_text(textwrap.dedent(MLFLOW))
    (library / "mlflow" / "entities.py").write_text(textwrap.dedent(ENTITIES))
    monkeypatch.syspath_prepend(library)
    for name in ("wandb", "mlflow", "mlflow.entities"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return lambda name: sys.modules[name]


def logged(writer: Any, lineage: Lineage, resumed: int, last: int, state: str) -> None:
    """Log an attempt as `RunRecorder` does after it has truncated the metrics."""
    writer.about(lineage)
    write(writer.run, resumed + 1, last)
    for line in read_lines(writer.run.metrics):
        if line["step"] > resumed:
            writer.write(line)
    writer.ending(state)
    writer.close()


def test_wandb_shows_a_branch_with_all_of_its_history(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the branch begins with its trunk's records and names it, and shows its attempts and its end."""
    module = installed(tmp_path / "lib", monkeypatch)
    trunk = RunDir(tmp_path / "trunk-1a2b3c4d")
    trunk.path.mkdir()
    trunk.loggers.write_text('{"wandb": "ab12"}')
    write(run, 1, 20)  # copied from the trunk
    fork = Fork(trunk, 20, "1a2b3c4d")
    for attempt, (resumed, last, state) in enumerate(((20, 30, "stopped"), (25, 40, "finished")), start=1):
        writer = WandB(run, resumed, pytest.fail, mode="offline", project="mine")
        logged(writer, Lineage({"seed": 3}, attempt, fork), resumed, last, state)
    (file,) = run.path.glob("wandb-*.jsonl")
    lines = list(read_lines(file))
    assert sorted({line["step"] for line in lines}) == list(range(1, 41))
    assert {line["step"]: line["runner/attempt"] for line in lines if "runner/attempt" in line} == {21: 1.0, 31: 2.0}
    options = module("wandb").OPTIONS[0]
    assert (options["group"], options["job_type"]) == ("trunk-1a2b3c4d", "branch")
    (code, preempting, _, config), (last_code, _, summary, _) = module("wandb").ENDS
    assert (code, preempting, last_code) == (1, True, 0)
    assert config["seed"] == 3
    assert config["trunk"] == {"run": "trunk-1a2b3c4d", "step": 20, "digest": "1a2b3c4d", "id": "ab12"}
    assert summary == {
        "last/eval_loss": 9 / 40,
        "best/eval_loss": 9 / 40,
        "state": "finished",
        "attempts": 2,
    }


def test_mlflow_shows_a_branch_as_the_child_of_its_trunk(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = installed(tmp_path / "lib", monkeypatch)
    trunk = RunDir(tmp_path / "trunk-1a2b3c4d")
    trunk.path.mkdir()
    logged(MLflow(trunk, 0, pytest.fail, tracking_uri="memory"), Lineage(), 0, 30, "failed")
    write(run, 1, 20)
    fork = Fork(trunk, 20, "1a2b3c4d")
    settings = {"seed": 3, "model": {"width": 8}, "long": "x" * 9000}
    for attempt, (resumed, last, state) in enumerate(((20, 30, "stopped"), (25, 40, "finished")), start=1):
        writer = MLflow(run, resumed, pytest.fail, tracking_uri="memory")
        logged(writer, Lineage(settings, attempt, fork), resumed, last, state)
        status = module("mlflow").RUNS["r2"]["status"]
        assert status == {"stopped": "KILLED", "finished": "FINISHED"}[state]
    first, branch = module("mlflow").RUNS.values()
    assert first["status"] == "FAILED"
    assert branch["tags"] == {
        "runner.fork.run": "trunk-1a2b3c4d",
        "runner.fork.step": "20",
        "runner.fork.digest": "1a2b3c4d",
        "mlflow.parentRunId": "r1",
        "runner.attempts": "2",
        "runner.state": "finished",
    }
    assert branch["params"] == {"seed": "3", "model.width": "8", "long": "x" * 500}
    assert sorted(m.step for m in branch["metrics"] if m.key == "loss") == list(range(1, 41))
    assert [m.value for m in branch["metrics"] if m.key == "best/eval_loss"] == [9 / 30, 9 / 40]


def test_next_attempt_sends_records_that_a_kill_kept_back(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resume from a checkpoint that is newer than the last record that the library sent."""
    module = installed(tmp_path / "lib", monkeypatch)
    logged(MLflow(run, 0, pytest.fail, tracking_uri="memory"), Lineage(), 0, 12, "failed")
    write(run, 1, 30)
    logged(MLflow(run, 30, pytest.fail, tracking_uri="memory"), Lineage(attempt=2), 30, 35, "finished")
    (only,) = module("mlflow").RUNS.values()
    assert sorted(m.step for m in only["metrics"] if m.key == "loss") == list(range(1, 36))


def test_tensorboard_shows_the_trunk_of_a_branch(run: RunDir) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(run, 1, 20)
    logged(TensorBoard(run, 20, pytest.fail), Lineage(), 20, 30, "finished")
    events = EventAccumulator(str(run.tensorboard), {"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 31))


def test_best_value_follows_the_direction_of_the_metric(run: RunDir) -> None:
    with resume_jsonl(run.metrics, 0) as writer:
        for step, accuracy in enumerate((0.5, 0.9, 0.7), start=1):
            writer.write({"step": step, "loss": 1.0})
            writer.write({"step": step, "eval_loss": 1 - accuracy, "accuracy": accuracy, "other": 2.0})
    evaluations.add(run, {"step": 3, "eval_loss": 0.25, "digest": "0f"})
    evaluations.add(run, {"step": 1, "eval_loss": 0.5, "digest": "0f"})
    summary = Summary(run, 3, {"accuracy": "max"}).values()
    assert summary == pytest.approx(
        {
            "last/eval_loss": 0.3,
            "last/accuracy": 0.7,
            "last/other": 2.0,
            "best/eval_loss": 0.1,
            "best/accuracy": 0.9,
            "evaluated/eval_loss": 0.25,
        }
    )
