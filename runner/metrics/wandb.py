"""Log to Weights & Biases: one logged run, continued after every resume."""

from __future__ import annotations

import html
import logging
import secrets
from collections.abc import Callable
from typing import Any

from runner.metrics.external import ExternalWriter
from runner.metrics.lineage import FAILED, STOPPED
from runner.metrics.media import Media
from runner.rundir.paths import RunDir

_log = logging.getLogger(__name__)


class WandB(ExternalWriter):
    """A writer to one W&B run, whose id is kept in the run directory.

    Steps that W&B already has are not sent again. After a kill the run repeats them with the same values.

    Args:
        run: the run directory.
        step: the step at which the run resumes.
        report: called with a one-line message if the logger fails.
        mode: online, offline (`wandb sync` sends it later) or disabled.
        options: further arguments of `wandb.init`: project, entity, name, tags, ...

    Example:
        >>> from pathlib import Path
        >>> from runner.metrics.wandb import WandB
        >>> from runner.rundir.paths import RunDir
        >>> run = RunDir(Path("outputs/base"))
        >>> run.path.mkdir(parents=True, exist_ok=True)
        >>> writer = WandB(run, mode="offline", project="examples")
        >>> for step in (1, 2, 3):
        ...     writer.write({"step": step, "loss": 1.0 / step})
        >>> writer.close()
    """

    name = "wandb"
    module = "wandb"
    package = "wandb"
    summarizes = True
    _logged: Any

    def __init__(
        self,
        run: RunDir,
        step: int = 0,
        report: Callable[[str], None] = _log.warning,
        mode: str = "online",
        **options: Any,
    ) -> None:
        super().__init__(run, step, report)
        self._options = {"name": run.path.name, "project": "runner", "mode": mode, **options}

    def open(self) -> None:
        import wandb

        identity = self.identity(lambda: secrets.token_hex(4))
        options, fork = dict[str, Any](), self.lineage.fork
        origin: dict[str, Any] = {}
        if fork is not None:  # not W&B's own `fork_from`, which most servers do not have
            name = fork.trunk.path.name
            options = {"group": name, "job_type": "branch", "notes": f"branch of {name} at step {fork.step}"}
            origin = {"trunk": {"run": name, "step": fork.step, "digest": fork.digest, "id": fork.logged_as(self.name)}}
        run = self.lineage.settings.get("run") or {}
        options |= {name: run[name] for name in ("tags", "notes") if run.get(name)} | self._options
        self._logged = wandb.init(id=identity, resume="allow", dir=str(self.run.path), **options)
        self._next = int(self._logged.step)
        self._first = True
        self._logged.config.update({**self.lineage.settings, **origin}, allow_val_change=True)

    def behind(self) -> bool:
        # An offline run does not know which steps W&B has: each attempt writes its steps into a separate folder.
        return self.is_new or (self._next <= self.step and not getattr(self._logged, "offline", False))

    def log(self, step: int, values: dict[str, float]) -> None:
        if step >= self._next:
            if self._first and step > self.step:  # marks the first step of each attempt
                self._first, values = False, {**values, "runner/attempt": float(self.lineage.attempt)}
            self._logged.log(values, step=step)

    def show(self, media: Media) -> None:
        import wandb

        if media.step >= self._next:
            if isinstance(media.content, bytes):
                shown = wandb.Image(str(media.path))
            else:
                shown = wandb.Html(f"<pre>{html.escape(media.content)}</pre>", inject=False)
            self._logged.log({media.name: shown}, step=media.step)

    def sync(self) -> None:
        """Do nothing: W&B sends in the background."""

    def end(self) -> None:
        state = {"state": self.ended, "attempts": self.lineage.attempt}
        state |= {"reason": self.reason} if self.reason else {}
        self._logged.summary.update({**self.summary.values(), **state})
        if self.ended == STOPPED:  # W&B then shows the run as preempted, not as failed
            self._logged.mark_preempting()
        self._logged.finish(exit_code=int(self.ended in (FAILED, STOPPED)))
