"""Log to MLflow: one logged run, continued after every resume."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from runner.metrics.external import ExternalWriter, flattened
from runner.metrics.lineage import FAILED, FINISHED, STOPPED
from runner.metrics.media import Media
from runner.rundir.paths import RunDir
from runner.system import clock

_log = logging.getLogger(__name__)

BATCH = 1000  # metrics per request: the maximum of MLflow
EVERY_S = 5.0
PARAMS, PARAM_LENGTH = 100, 500  # per request, and in characters: limits that every version of MLflow accepts
STATUS = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}


class MLflow(ExternalWriter):
    """A writer to one MLflow run, whose id is kept in the run directory.

    Steps that MLflow already has are not sent again. After a kill the run repeats them with the same values.

    Args:
        run: the run directory.
        step: the step at which the run resumes.
        report: called with a one-line message if the logger fails.
        experiment: name of the experiment; created if it does not exist.
        tracking_uri: a server or a store, for example sqlite:///mlflow.db; None: MLflow's own setting.

    Example:
        >>> from pathlib import Path
        >>> from runner.metrics.mlflow import MLflow
        >>> from runner.rundir.paths import RunDir
        >>> run = RunDir(Path("outputs/base"))
        >>> run.path.mkdir(parents=True, exist_ok=True)
        >>> writer = MLflow(run, experiment="examples", tracking_uri="sqlite:///mlflow.db")
        >>> for step in (1, 2, 3):
        ...     writer.write({"step": step, "loss": 1.0 / step})
        >>> writer.close()
    """

    name = "mlflow"
    module = "mlflow"
    package = "mlflow"
    summarizes = True
    _client: Any

    def __init__(
        self,
        run: RunDir,
        step: int = 0,
        report: Callable[[str], None] = _log.warning,
        experiment: str = "runner",
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__(run, step, report)
        self._experiment = experiment
        self._tracking_uri = tracking_uri

    def open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._param = Metric, Param
        self._client = MlflowClient(self._tracking_uri)
        self._id = self.identity(self._create)
        self._client.update_run(self._id, status="RUNNING")
        self._client.set_tag(self._id, "runner.attempts", str(self.lineage.attempt))
        self._waiting: list[Any] = []
        self._step = self.step
        self._sent_at = clock.monotonic()
        latest = self._client.get_run(self._id).data.metrics
        self._last = {key: max(m.step for m in self._client.get_metric_history(self._id, key)) for key in latest}

    def _create(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        made = self._client.create_run(experiment, tags=self._tags(), run_name=self.run.path.name)
        params = [self._param(key, str(value)[:PARAM_LENGTH]) for key, value in flattened(self.lineage.settings, ".")]
        for first in range(0, len(params), PARAMS):
            self._client.log_batch(made.info.run_id, params=params[first : first + PARAMS])
        return str(made.info.run_id)

    def _tags(self) -> dict[str, str]:
        """Return the run's tags and note. For a branch, add its fork and the trunk as parent run."""
        run, fork = self.lineage.settings.get("run") or {}, self.lineage.fork
        own = {f"runner.tag.{tag}": "true" for tag in run.get("tags") or []}
        if run.get("notes"):
            own["mlflow.note.content"] = str(run["notes"])
        if fork is None:
            return own
        tags = {"run": fork.trunk.path.name, "step": str(fork.step), "digest": fork.digest}
        tags = {f"runner.fork.{name}": text for name, text in tags.items()}
        parent = fork.logged_as(self.name)
        if parent is not None:
            with suppress(Exception):  # the library raises various errors for an unknown run
                self._client.get_run(parent)
                tags["mlflow.parentRunId"] = parent
        return own | tags

    def behind(self) -> bool:
        return max(self._last.values(), default=0) < self.step

    def log(self, step: int, values: dict[str, float]) -> None:
        now, self._step = int(clock.wall() * 1000), step
        fresh = {key: value for key, value in values.items() if step > self._last.get(key, -1)}
        self._waiting += [self._metric(key, value, now, step) for key, value in fresh.items()]
        if len(self._waiting) >= BATCH or clock.monotonic() - self._sent_at > EVERY_S:
            self.sync()

    def show(self, media: Media) -> None:
        folder = media.name.rpartition("/")[0]
        self._client.log_artifact(self._id, str(media.path), folder or None)

    def sync(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:BATCH])
            del self._waiting[:BATCH]
        self._sent_at = clock.monotonic()

    def end(self) -> None:
        self.log(self._step, self.summary.values())
        self.sync()
        self._client.set_tag(self._id, "runner.state", self.ended)
        if self.reason:
            self._client.set_tag(self._id, "runner.reason", self.reason)
        self._client.set_terminated(self._id, status=STATUS[self.ended])
