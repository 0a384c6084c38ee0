"""Use the runner from Python: train runs from a script or a notebook, and read their run directories."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from runner.config.labels import labels
from runner.errors import ExitStatus, RunDirError, UserError, unchained
from runner.metrics.external import flattened
from runner.metrics.records import read_records
from runner.rundir import evaluations
from runner.rundir.artifacts import Artifact, artifacts
from runner.rundir.attempt_log import ended_attempts
from runner.rundir.find import find_runs, run_dir
from runner.rundir.paths import RunDir
from runner.rundir.provenance import code_facts, environment_facts
from runner.rundir.state import State, asked
from runner.rundir.trust import reading
from runner.system import files, processes

if TYPE_CHECKING:
    from runner.config.composition import Composed
    from runner.config.schema import Config
    from runner.training.load import Loaded


@dataclass(frozen=True)
class Run:
    """A run, read from its directory. Each property reads the files again, so values change while the run is live.

    Example:
        >>> import runner
        >>> run = runner.Run("outputs/base")
        >>> run.state, run.step, run.checkpoints
        ('finished', 20, [10, 20])
        >>> min(run.metrics()["loss"])
        4.863478302955627
        >>> run.evaluations()
           step  eval_loss
        0    10   4.968523
        1    20   4.842917
        >>> run.config.sampler.temperature
        1.0
        >>> model, config, step = run.load("best")

    Args:
        path: the run directory.

    Raises:
        RunDirError: the path is not a run directory.
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", run_dir(path).path)

    @property
    def _run(self) -> RunDir:
        return RunDir(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def state(self) -> str:
        """Return the state that `runner status` shows, such as `finished`, `running` or `failed`."""
        return self._look().word

    @property
    def reason(self) -> str | None:
        """Return why the run failed, waits or ended early; None if there is nothing to explain."""
        return self._look().reason

    @property
    def step(self) -> int:
        """Return the last recorded step."""
        return self._look().step

    def _look(self) -> State:
        """Read the run's state from its records, its lease and its job.

        Raises:
            RunDirError: a record is malformed.
        """
        with reading(self._run):
            return asked(self._run)

    @property
    def tags(self) -> list[str]:
        """Return the run's tags (`run.tags`)."""
        with reading(self._run):
            return labels(self._run)[0]

    @property
    def notes(self) -> list[str]:
        """Return the run's notes: first `run.notes`, then the notes added with `runner note`."""
        with reading(self._run):
            return labels(self._run)[1]

    @property
    def config(self) -> Config:
        """Return the config that the run trains with.

        Raises:
            UserError: the config cannot be read.
        """
        from runner.config.frozen import load_plain, trained

        with unchained(), reading(self._run):
            return trained(load_plain(self.path))

    def metrics(self) -> Any:
        """Return the records of all steps as a pandas DataFrame, or as a dict of lists if pandas is not installed.

        Values per source or per optimizer are in columns such as `loss_by_source/prose`.
        """
        with reading(self._run):
            return _table(record for record in read_records(self._run.metrics) if "loss" in record)

    def evaluations(self) -> Any:
        """Return the results of all evaluations, ordered by step, in the same form as `metrics`.

        The rows include evaluations during training and those run with `runner evaluate`. For the latter, the column
        `settings` lists the settings that differ from the run's settings.
        """
        with reading(self._run):
            during = [record for record in read_records(self._run.metrics) if "loss" not in record]
            later = [
                {key: value for key, value in record.items() if key != "digest" and (key != "settings" or value)}
                for record in evaluations.results(self._run)
            ]
        return _table(sorted([*during, *later], key=lambda record: int(record["step"])))

    def timings(self) -> Any:
        """Return speed, data wait and memory per step from timings.jsonl, in the same form as `metrics`."""
        with reading(self._run):
            return _table(read_records(self._run.timings))

    def artifacts(self) -> list[Artifact]:
        """List the images and texts that callbacks logged, by name and step. Read the content with `read()`."""
        with reading(self._run):
            return artifacts(self._run)

    @property
    def code(self) -> dict[str, Any]:
        """Return the identity of the code: commits, and digests of uncommitted changes and of your own files."""
        with reading(self._run):
            return code_facts(files.read_object(self._run.code))

    @property
    def environment(self) -> dict[str, Any]:
        """Return the environment of the run's last start and last attempt: package versions, platform, node, ranks."""
        with reading(self._run):
            attempts = ended_attempts(self._run)
            last = attempts[-1] if attempts else files.read_object(self._run.attempt)
            return environment_facts(files.read_object(self._run.code), last)

    @property
    def checkpoints(self) -> list[int]:
        """Return the steps of the checkpoints, in ascending order."""
        with reading(self._run):
            return sorted(self._run.checkpoint_steps())

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Return the entries of attempts.jsonl, one for each attempt that has ended."""
        with reading(self._run):
            return ended_attempts(self._run)

    def load(self, step: int | str | None = None, device: Any = "cpu", *, raw: bool = False) -> Loaded:
        """Load the model from a checkpoint of this run; see `runner.load`."""
        from runner.training.load import load

        with unchained():
            return load(self.path, step, device, raw=raw)

    def __repr__(self) -> str:
        state = self._look()
        total = state.status.get("total")
        reason = f": {state.reason}" if state.reason else ""
        attempts = len(state.attempts)
        loss = state.newest.get("loss")
        checkpoints = ", ".join(map(str, self.checkpoints)) or "none"
        return (
            f"Run {os.path.relpath(self.path)}\n"
            f"  {state.word}{reason}, step {state.step}{f' of {total}' if total else ''}, "
            f"{attempts} attempt{'' if attempts == 1 else 's'}\n"
            f"  {'no step yet' if loss is None else f'loss {loss:.4f}'}; checkpoints: {checkpoints}"
        )


def runs(root: str | os.PathLike[str] = "outputs") -> list[Run]:
    """List the runs in a directory and its subdirectories, ordered by path.

    Example:
        >>> import runner
        >>> for run in runner.runs("outputs"):
        ...     print(run.name, run.state, run.step)
        base finished 20
        long running 1200
        >>> finished = [run for run in runner.runs("outputs") if run.state == "finished"]
        >>> best = min(finished, key=lambda run: min(run.metrics()["loss"]))

    Args:
        root: the directory to search.

    Raises:
        RunDirError: the directory does not exist.
    """
    if not files.is_dir(Path(root)):
        raise RunDirError(f"{root} is not a directory: pass the one that holds the runs, such as outputs")
    return [Run(each.path) for each in find_runs(Path(root)) if files.is_file(each.config)]


def compose(*overrides: str, config_dir: str | os.PathLike[str] | None = None) -> Config:
    """Compose and check the config of a command without starting anything.

    Example:
        >>> import runner
        >>> config = runner.compose("experiment=smoke", "train.steps=20")
        >>> config.train.steps, list(config.data.sources)
        (20, ['code'])
        >>> try:
        ...     runner.compose("train.step=20")
        ... except runner.errors.UserError as error:
        ...     print(error)
        train.step=20: no such option in train (did you mean 'steps'?); there are steps, epochs, ...

    Args:
        overrides: as on the command line, such as `"data=mixture"` or `"train.steps=100"`.
        config_dir: an additional directory with config groups and experiments.

    Raises:
        UserError: some overrides are wrong; the message has one line for each error.
    """
    return _composed(overrides, config_dir).config


def train(*overrides: str, config_dir: str | os.PathLike[str] | None = None) -> Run:
    """Train or resume the run that these overrides describe, and return it once it has finished.

    Training runs in a separate process, as it does for the command. This process keeps its random generators, signal
    handlers and threads, and the results are bitwise identical to the command's. The run's output is copied to standard
    output and error. With `launcher=slurm` the call returns once the job is submitted. If you press Ctrl-C or interrupt
    the kernel, the run saves a checkpoint before KeyboardInterrupt is raised.

    Example:
        >>> import runner
        >>> run = runner.train("experiment=smoke", "train.steps=20", "eval.every_steps=10", "run.dir=outputs/base")
        starting at step 0 of 20 in /home/you/project/outputs/base
        ...
        >>> run.state, run.step
        ('finished', 20)
        >>> run.metrics().plot(x="step", y="loss")  # with pandas and matplotlib
        >>> for seed in range(3):  # a sweep
        ...     runner.train("experiment=smoke", "train.steps=20", f"seed={seed}")

    Args:
        overrides: as on the command line, such as `"data=mixture"` or `"train.steps=100"`.
        config_dir: an additional directory with config groups and experiments.

    Raises:
        UserError: some overrides are wrong, or the run failed; the message has the last lines of its output.
        KeyboardInterrupt: you interrupted the run, and it has saved a checkpoint.
    """
    job = _composed(overrides, config_dir)
    more = [] if config_dir is None else ["--config-dir", os.fspath(config_dir)]
    status, said = _carried_out([sys.executable, "-m", "runner", *overrides, *more])
    if status != ExitStatus.FINISHED:
        errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        error = UserError("\n".join(errors or said[-1:]) or f"the run ended with status {status}")
        error.status = ExitStatus(status) if status in ExitStatus.__members__.values() else ExitStatus.FAILED
        raise error
    return Run(job.run_dir)


def _composed(overrides: Sequence[str], config_dir: str | os.PathLike[str] | None) -> Composed:
    from runner.config.composition import Composer

    with unchained():
        for each in overrides:
            if not isinstance(each, str) or each.startswith("-"):
                raise UserError(
                    f"{each!r} is no override: pass each as a text, such as 'train.steps=100'; for a sweep call train "
                    "in a loop, or run the command with -m"
                )
        return Composer([] if config_dir is None else [os.fspath(config_dir)]).compose(list(overrides))


def _carried_out(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command and wait for it to end. If this process dies first, the command is ended too.

    Returns:
        The exit status, and the lines that the command wrote to standard error.
    """
    paths = [os.path.abspath(path) for path in sys.path]
    variables = {**processes.environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    process = processes.start(
        command,
        env=processes.bound(variables),
        stdin=processes.DEVNULL,
        stdout=processes.PIPE,
        stderr=processes.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that only this process receives Ctrl-C and forwards it once
    )
    with process:
        return _followed(process)


def _followed(process: processes.Process[str]) -> tuple[int, list[str]]:
    """Copy the output of a process until it ends, and forward Ctrl-C to it.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C, and the process has ended.
    """
    said: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    copying = [
        threading.Thread(target=_copy, args=(process.stdout, sys.stdout, None), daemon=True),
        threading.Thread(target=_copy, args=(process.stderr, sys.stderr, said), daemon=True),
    ]
    for thread in copying:
        thread.start()
    interrupted = False
    while True:
        try:
            status = process.wait()
            for thread in copying:
                thread.join()
            break
        except KeyboardInterrupt:
            interrupted = True
            process.send_signal(signal.SIGINT)  # the run saves; a second SIGINT kills it immediately
    if interrupted:
        raise KeyboardInterrupt
    return status if status >= 0 else 128 - status, said


def _copy(source: IO[str], to: TextIO, lines: list[str] | None) -> None:
    """Copy lines to a stream and append them to `lines`. Ignore stream errors, because they must not stop the run."""
    for line in source:
        if lines is not None:
            lines.append(line.rstrip("\n"))
        with suppress(OSError, ValueError):
            to.write(line)
            to.flush()


def _table(records: Iterable[Mapping[str, Any]]) -> Any:
    """Convert records to a DataFrame or a dict of lists. Missing values are nan."""
    rows = [dict(flattened(record, "/")) for record in records]
    if importlib.util.find_spec("pandas") is not None:
        import pandas

        return pandas.DataFrame.from_records(rows)
    names = dict.fromkeys(name for row in rows for name in row)  # unique, in order of appearance
    return {name: [row.get(name, math.nan) for row in rows] for name in names}
