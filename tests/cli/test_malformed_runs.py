"""Every command reports malformed content of a run directory in one line, and shows the other runs as before."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from checkpoints import Toy, manager
from composing import compose
from fake_launcher import Command, FakeLauncher
from hypothesis import given, settings
from hypothesis import strategies as st

from exactdata.elastic import ElasticSampler
from exactdata.order.batch_shape import BatchShape
from exactdata.queries.order_record import OrderRecord
from runner.__main__ import run as command_line
from runner.data import order_file
from runner.errors import ExitStatus
from runner.rundir.paths import RunDir
from runner.rundir.trust import RECORDS as KINDS_OF_RECORDS
from runner.system import files
from runner.system.processes import this_process
from runner.system.signals import STOP

SIZES = {"prose": 60, "code": 200}
PATIENCE_S = 400  # a busy machine may be slow; an endless wait is found all the same
RECORDS: dict[str, dict[str, object]] = {
    "status.json": {
        "state": "finished",
        "step": 3,
        "total": 3,
        "loss": 2.5,
        "attempts": 1,
        "job_id": "7",
        "node": "n1",
    },
    "attempt.json": {},
    "finished.json": {"steps": 3},
    "job.json": {"job_id": "7", "launcher": "launch.slurm.SlurmLauncher"},
    "code.json": {"overrides": ["seed=1"], "packages": {}, "repositories": {}},
}
LINES: dict[str, list[dict[str, object]]] = {
    "attempts.jsonl": [{"attempt": 1, "cause": "finished", "start_step": 0, "checkpoint_step": 3, "steps_lost": 0}],
    "metrics.jsonl": [{"step": step, "loss": 1.0 / step, "samples": {"code": 2}} for step in (1, 2, 3)],
    "timings.jsonl": [{"step": 1, "tokens_per_s": 5.0}],
}
CHECKPOINT = "checkpoints/step_00000003"
ENTRIES = [
    *(name for name in KINDS_OF_RECORDS if name not in ("tensorboard", "loggers.json")),
    *("lease/00000001.json", "lease/00000001.beat"),
    *(
        CHECKPOINT,
        *(
            f"{CHECKPOINT}/{name}"
            for name in ("manifest.json", "train_state.pt", "tensors.json", "rank_00000.safetensors")
        ),
    ),
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a finished run of three steps."""
    run = RunDir(tmp_path_factory.mktemp("template") / "run")
    run.path.mkdir()
    for name, record in RECORDS.items():
        (run.path / name).write_text(json.dumps(record))
    for name, lines in LINES.items():
        (run.path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.config.write_text(compose(["experiment=smoke", f"run.dir={run.path}", "train.steps=3"]).text)
    sampler = ElasticSampler(SIZES, {"prose": 1, "code": 3}, global_batch_size=8, num_replicas=1, seed=3)
    order = OrderRecord.of_elastic(
        sampler.state_dict(), SIZES, steps=3, tokens_per_sample={}, batch_shapes=(BatchShape(0, 4, 2),)
    )
    order_file.write(order, run.order)
    toy = Toy()
    saving = manager(run.checkpoints)
    for _ in range(3):
        toy.train()
    toy.save(saving)
    run.lease.mkdir(exist_ok=True)
    (run.lease / "00000001.json").write_text(json.dumps({**this_process(), "released": True}))
    (run.lease / "00000001.beat").write_text("1")
    return run.path


def removed(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def content(data: bytes) -> Callable[[Path], None]:
    return lambda path: void(removed(path).write_bytes(data))


def every_value(value: object) -> Callable[[Path], None]:
    """Return a function that replaces all values of a record."""

    def damage(path: Path) -> None:
        record: dict[str, Any] = {}
        with suppress(OSError, ValueError, IndexError):
            record = json.loads(path.read_text().splitlines()[0] if path.suffix == ".jsonl" else path.read_text())
        names = (isinstance(record, dict) and record) or (
            "step",
            "steps",
            "state",
            "loss",
            "attempt",
            "cause",
            "job_id",
            "launcher",
        )
        removed(path).write_text(json.dumps(dict.fromkeys(names, value)) + "\n")

    return damage


def void(_: object) -> None: ...


def cut(path: Path) -> None:
    data = path.read_bytes() if path.is_file() else b'{"a"'
    removed(path).write_bytes(data[: len(data) // 2])


def too_large(path: Path) -> None:
    removed(path).touch()
    os.truncate(path, files.MAX_RECORD_BYTES + 1)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, working_in(removed(path).parent):
        listener.bind(path.name)  # the whole path may be too long for an address


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


VALUES: tuple[object, ...] = (*("\x1b[2Jx", [], {"a": 1}, float("nan"), float("inf"), 10**400, -1, True, None, 2**63),)
DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: void(removed(path)),
    "truncated": cut,
    "large": too_large,
    "fifo": lambda path: os.mkfifo(removed(path)),
    "directory": lambda path: removed(path).mkdir(),
    "socket": bound,
    "loop": lambda path: removed(path).symlink_to(path.name),
    "link to a file": lambda path: removed(path).symlink_to("/etc/passwd"),
    "link to a directory": lambda path: removed(path).symlink_to("/etc"),
    "escapes": content(b'\x1b[2J\x1b]0;x\x07: "\x9b\n'),
    **{
        f"text {text[:9]!r}": content(text.encode("latin-1"))
        for text in ("", "null\n", "7\n", "[7]\n", '"x"\n', "NaN\n", "\xff\n", "\0" * 100)
    },
    "deep list": content(b"[" * 100_000 + b"\n"),
    "deep object": content(b'{"a":' * 100_000 + b"\n"),
    "long number": content(b'{"step": ' + b"9" * 5000 + b"}\n"),
    "long line": content(b'{"step": 1, "loss": 1, "x": "' + b"a" * (1 << 20) + b'"}\n'),
    **{f"values {str(value)[:9]!r}": every_value(value) for value in VALUES},
}
if os.geteuid() == 0:
    DAMAGES["device"] = lambda path: os.mknod(removed(path), 0o20666, os.makedev(1, 5))


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail and name a command that hangs."""

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return exit status, output and errors of a command, which are text, in time, without a traceback."""
    with within(PATIENCE_S):
        status = command_line(arguments)
    out, err = capsys.readouterr()
    assert status in (0, 1, 2), (arguments, err)
    for line in [*out.splitlines(), *err.splitlines()]:
        assert line.isprintable(), (arguments, line)
    assert all(line.startswith(("error: ", "warning: ")) for line in err.splitlines()), (arguments, err)
    assert (status == 0) or err or "--verify" in arguments or arguments[0] == "checkpoints", arguments
    return status, out, err


def check_all_commands(root: Path, capsys: pytest.CaptureFixture[str], entry: str = "") -> None:
    """Run the commands that read `entry`, which is damaged in the run `odd` and not in `fine`."""
    odd, fine = str(root / "odd"), str(root / "fine")
    status, out, _ = asked(capsys, "status", str(root), "--json")
    shown = json.loads(out, parse_constant=pytest.fail)
    assert status == 0
    assert {row["run"]: row["state"] for row in shown}["fine"] == "finished"
    assert [row["run"] for row in shown] == ["fine", "odd"]
    assert len(asked(capsys, "status", str(root))[1].splitlines()) >= len(shown) + 1
    if not entry or entry.startswith(("metrics", "attempts", "timings", "evaluations", "config", "status")):
        compared = json.loads(asked(capsys, "report", str(root), "--json")[1], parse_constant=pytest.fail)["runs"]
        losses = {row["run"]: row["metrics"].get("loss") for row in compared}
        assert losses.keys() == {"fine", "odd"}
        assert losses["fine"] == {"last": 1 / 3, "best": 1 / 3, "best_step": 3}
        asked(capsys, "report", odd, fine, "--csv", str(root / "runs.csv"), "--steps-csv", str(root / "steps.csv"))
    if not entry or entry.startswith(("order", "status", "metrics", "finished")):
        for question in (["--plan"], ["--step", "2"], ["--sample", "code:1"], ["--resume-plan", "world_size=2"]):
            asked(capsys, "inspect", odd, *question)
        asked(capsys, "inspect", fine, "--diff", odd)
    if not entry or entry.startswith("checkpoints"):
        for question in ([], ["--json"], ["--verify"], ["--export", str(root / "weights.safetensors")]):
            asked(capsys, "checkpoints", odd, *question)


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    for name in ("odd", "fine"):
        shutil.copytree(template, tmp_path / "runs" / name)
    (tmp_path / "runs" / "fine" / "job.json").unlink()  # no queue is asked
    (tmp_path / "runs" / "odd" / "job.json").unlink()
    return tmp_path / "runs"


def test_commands_read_the_run_that_is_damaged_below(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_all_commands(root, capsys)
    assert asked(capsys, "checkpoints", str(root / "odd"), "--verify")[0] == 0
    assert asked(capsys, "inspect", str(root / "odd"), "--plan")[0] == 0
    assert asked(capsys, "report", str(root / "odd"))[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_damaged_entry_is_one_message(
    template: Path, root: Path, entry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, damage in DAMAGES.items():
        removed(root / "odd")
        shutil.copytree(template, root / "odd")
        damage(root / "odd" / entry)
        try:
            check_all_commands(root, capsys, entry)
        except BaseException as error:
            error.add_note(f"{entry}: {name}")
            raise


@pytest.mark.parametrize("kind", ["fifo", "link to a directory"])
def test_no_entry_of_a_run_may_lead_elsewhere(
    root: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message names it, in every command."""
    monkeypatch.setattr(STOP, "install", lambda: None)
    for entry in KINDS_OF_RECORDS:
        kept = root.parent / "kept"
        damage, path = DAMAGES[kind], root / "odd" / entry
        if path.exists():
            path.rename(kept)
        damage(path)
        (row,) = [row for row in json.loads(asked(capsys, "status", str(root), "--json")[1]) if row["run"] == "odd"]
        assert row["state"] == "unreadable"
        (row,) = json.loads(asked(capsys, "report", str(root / "odd"), "--json")[1])["runs"]
        assert (row["state"], row["metrics"]) == ("unreadable", {})
        for arguments in (["inspect", "--plan"], ["checkpoints"], ["resume", "train.steps=9"]):
            status, _, err = asked(capsys, arguments[0], str(root / "odd"), *arguments[1:])
            assert status == ExitStatus.USAGE, (entry, arguments)
            assert str(path) in err or "config.yaml" in err, (entry, arguments)
        removed(path)
        if kept.exists():
            kept.rename(path)


def test_a_run_directory_that_is_a_link_is_a_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The user who names it has made the link."""
    (root / "link").symlink_to("fine")
    for arguments in (["report", "--json"], ["inspect", "--plan"], ["checkpoints"]):
        assert asked(capsys, arguments[0], str(root / "link"), *arguments[1:])[0] == 0
    (root.parent / "outputs").symlink_to(root)
    assert "fine" in asked(capsys, "status", str(root.parent / "outputs"))[1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of a value and of everything in it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, part in inner for found in leaves(part, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return {key: put(part, path[1:], new) if key == path[0] else part for key, part in value.items()}
    return [put(part, path[1:], new) if index == path[0] else part for index, part in enumerate(value)]


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data(), entry=st.sampled_from(["order.json", "status.json", "attempts.jsonl", "metrics.jsonl"]))
def test_any_value_within_a_record_may_change(
    template: Path, root: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject, entry: str
) -> None:
    lines = (template / entry).read_text()
    record = json.loads(lines.splitlines()[0] if entry.endswith("l") else lines)
    changed = put(record, data.draw(st.sampled_from(leaves(record))), data.draw(json_values))
    (root / "odd" / entry).write_text(json.dumps(changed) + "\n")
    try:
        check_all_commands(root, capsys, entry)
    finally:
        shutil.copy(template / entry, root / "odd" / entry)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "damage"),
    [("status.json", "fifo"), ("config.yaml", "deep list"), ("lease", "link to a directory"), ("job.json", "large")],
)
def test_a_sweep_starts_the_runs_that_it_can(
    run: Command, command: Command, conf: Path, capsys: pytest.CaptureFixture[str], entry: str, damage: str
) -> None:
    words = ("-m", "seed=1,2,3", "train.steps=10", "experiment=smoke")
    assert run(*words) == 0
    odd, *others = FakeLauncher.launched
    FakeLauncher.launched.clear()
    DAMAGES[damage](odd / entry)
    capsys.readouterr()
    with within(PATIENCE_S):
        assert run(*words) == ExitStatus.FAILED
        assert FakeLauncher.launched == others
        out = capsys.readouterr().out
        (line,) = [line for line in out.splitlines() if odd.name in line.partition(":")[0]]
        assert entry in line
        FakeLauncher.launched.clear()
        assert command("resume", "--config-dir", str(conf), *map(str, (odd, *others))) == ExitStatus.FAILED
        assert FakeLauncher.launched == others
