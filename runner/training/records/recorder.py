"""Write the records of a run. Rank 0 has a `RunRecorder`, and the other ranks have a `Recorder`.

metrics.jsonl has values that depend only on the run, and timings.jsonl has values that depend on the machine. A full
disk does not stop training: records wait in memory until they can be written. No checkpoint is committed before the
metrics up to its step are durable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from runner.errors import FileError, SupersededError, UserError
from runner.metrics import JsonlWriter, Writer
from runner.metrics.lineage import FAILED, Lineage
from runner.metrics.media import Media
from runner.metrics.progress import ProgressBar
from runner.rundir.appender import withdraw
from runner.rundir.attempt_log import AttemptLog, insist
from runner.system import clock, files
from runner.training.records.resources import StepMeter

TIMINGS_EVERY_STEPS = 10


class Recorder:
    """A recorder that writes nothing. All ranks except 0 use it."""

    state: str = FAILED
    """How the attempt ended, for the loggers. See `runner.metrics.lineage`."""
    reason: str | None = None
    """The reason why the run ended before its last step."""

    def step(self, record: dict[str, Any], seconds: float, samples: int, tokens: int | None = None) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...

    def last_evaluation(self, record: dict[str, Any]) -> None: ...

    def before_save(self) -> bool:
        return True

    def cadence(self, explanation: str) -> None: ...

    def callback(self, step: int, moment: str, values: dict[str, float]) -> None: ...

    def media(self, media: Media) -> None: ...

    def close(self) -> None: ...


@dataclass
class RunRecorder(Recorder):
    """Write the run directory's records, the loggers, the progress display and the status."""

    metrics: JsonlWriter
    timings: JsonlWriter
    writers: list[Writer]
    bar: ProgressBar
    log: AttemptLog
    meter: StepMeter
    last_save: Callable[[], Mapping[str, Any] | None]
    add_evaluation: Callable[[dict[str, Any]], object] = lambda record: None
    """Function that adds a result to the results of `runner evaluate`."""
    state: str = FAILED
    reason: str | None = None
    _waiting: list[dict[str, Any]] = field(default_factory=list)
    _seconds: float = 0.0
    _samples: int = 0
    _tokens: int | None = 0  # None if the data have no tokens
    _reported_save: int | None = None
    _interval: str = ""

    def about(self, lineage: Lineage) -> None:
        """Pass the run's lineage to the loggers that support it."""
        for writer in self.writers:
            if hasattr(writer, "about"):
                writer.about(lineage)

    def step(self, record: dict[str, Any], seconds: float, samples: int, tokens: int | None = None) -> None:
        """Write the record of one step.

        Args:
            record: the line of metrics.jsonl.
            seconds: duration of the step in seconds.
            samples: number of samples over all ranks.
            tokens: number of tokens over all ranks, or None if the data have no tokens.
        """
        self._write(record)
        self._seconds += seconds
        self._samples += samples
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens
        self.meter.end(seconds)
        speeds = self._speeds()
        self.bar.update(
            record["step"], record["loss"], speeds["samples_per_s"], speeds.get("tokens_per_s"), self.meter.data_wait
        )
        rounded: dict[str, Any] = {name: speed and round(speed, 1) for name, speed in speeds.items()}
        self.log.update(step=record["step"], loss=record["loss"], **rounded)
        if record["step"] % TIMINGS_EVERY_STEPS == 0:
            self._write_timing(record["step"], {name: speed for name, speed in speeds.items() if speed is not None})

    def _speeds(self) -> dict[str, Any]:
        """Return samples and tokens per second since the last line of timings.jsonl. Tokens may be None."""
        seconds = self._seconds or math.inf
        tokens = None if self._tokens is None else self._tokens / seconds
        return {"samples_per_s": self._samples / seconds, "tokens_per_s": tokens}

    def evaluation(self, record: dict[str, Any]) -> None:
        self._write(record)
        self._show_evaluation(record)

    def last_evaluation(self, record: dict[str, Any]) -> None:
        """Write the record of an evaluation at the last step that was not due. It is not written to metrics.jsonl."""
        try:
            self.add_evaluation(record)
        except SupersededError:
            raise
        except (OSError, UserError) as error:
            self.warn(f"the last evaluation could not be recorded ({error}): `runner evaluate` repeats it")
        for writer in self.writers:
            writer.write(record)
        self._show_evaluation(record)

    def _show_evaluation(self, record: dict[str, Any]) -> None:
        results = {name: value for name, value in record.items() if name != "step" and isinstance(value, float)}
        self.log.update(eval_loss=record.get("eval_loss"))
        shown = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in results.items())
        self.bar.say(f"step {record['step']}: {shown}")

    def before_save(self) -> bool:
        """Sync all records to disk. Return False if the disk fails. In that case, no checkpoint may be committed."""
        try:
            self._drain()
            self.metrics.sync()
        except OSError as error:
            reason = error.strerror or error
            self.warn(f"metrics could not be written ({reason}): no checkpoint was saved; will retry")
            return False
        return True

    def cadence(self, explanation: str) -> None:
        """Write an explanation of the checkpoint cadence to the status. Print it if the interval has changed."""
        interval = explanation.partition(":")[0]
        if interval != self._interval:
            self._interval = interval
            self.bar.say(explanation)
        self.log.update(cadence=explanation)

    def callback(self, step: int, moment: str, values: dict[str, float]) -> None:
        """Log callback values to timings.jsonl and the loggers, not to metrics.jsonl, because they depend on kills."""
        with suppress(OSError):  # timings may be lost
            self.timings.write({"step": step, "time": clock.wall(), "callback": moment, **values})
        for writer in self.writers:
            writer.write({"step": step, **values})

    def media(self, media: Media) -> None:
        """Write an image or a text to a file, and pass it to the loggers that support it."""
        content = media.content.encode() if isinstance(media.content, str) else media.content
        try:
            self.log.run.make_dirs(media.path.parent)
            files.write_atomic(media.path, content, durable=False, guard=self.log.run.guard)
        except OSError as error:
            self.warn(f"{media.path} could not be written ({error.strerror or error}): it is lost")
            return
        for writer in self.writers:
            if hasattr(writer, "media"):  # a user's writer may not support it
                writer.media(media)

    def warn(self, message: str) -> None:
        """Report an error that does not stop training, in the status and on the screen."""
        self.bar.say(f"warning: {message}")
        self.log.warn(message)

    def close(self) -> None:
        """Flush and close everything. Report records that still cannot be written; the run then stays unfinished."""
        try:
            insist(self._drain, self.metrics.path)
        except FileError as error:
            self.log.lost_records = str(error)
            self.warn(f"{len(self._waiting)} records could not be written: {error}")
        for writer in self.writers:
            if hasattr(writer, "ending"):
                writer.ending(self.state, self.reason)
            writer.close()
        self.bar.close()
        try:
            insist(self.metrics.close, self.metrics.path)
        except FileError as error:
            self.log.lost_records = str(error)
            self.warn(str(error))
        try:
            self.timings.close()
        except OSError as error:
            self.warn(f"{self.timings.path.name} could not be closed: {error}")
            return
        if not self.log.lost_records:
            with suppress(OSError, SupersededError):  # the next attempt copies the records
                withdraw(self.log.run)

    def _write(self, record: dict[str, Any]) -> None:
        self._waiting.append(record)
        try:
            self._drain()
        except OSError as error:
            if len(self._waiting) == 1:  # report once, not at every step
                self.warn(f"metrics are kept in memory until they can be written: {error.strerror or error}")
        for writer in self.writers:
            writer.write(record)

    def _drain(self) -> None:
        while self._waiting:
            self.metrics.write(self._waiting[0])
            self._waiting.pop(0)

    def _write_timing(self, step: int, speeds: dict[str, float]) -> None:
        record: dict[str, Any] = {"step": step, "time": clock.wall()}
        save = dict(self.last_save() or {})  # another thread changes it
        if save and save["step"] != self._reported_save:
            self._reported_save = save["step"]
            record["save"] = save
        self._seconds, self._samples, self._tokens = 0.0, 0, 0
        figures = {**speeds, **self.meter.take()}
        record |= figures
        try:
            self.timings.write(record)
        except OSError:
            return  # the next timing is written ten steps later
        for writer in self.writers:
            writer.write({"step": step, **figures, **_flat_save(record.get("save"))})


def _flat_save(save: dict[str, Any] | None) -> dict[str, Any]:
    return {f"save_{k}": v for k, v in (save or {}).items() if isinstance(v, (int, float)) and k != "step"}
