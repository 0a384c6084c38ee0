"""Weights & Biases: the same logged run after every resume."""

from __future__ import annotations

import html
import logging
import secrets
from collections.abc import Callable
from typing import Any

from runner.metrics.external import ExternalWriter
from runner.metrics.media import Media
from runner.rundir.paths import RunDir

_log = logging.getLogger(__name__)


class WandB(ExternalWriter):
    """Logs to one W&B run, whose id is kept in the run directory.

    Steps that W&B already has are not sent again: after a kill the run repeats them with the same values.

    Args:
        run: the run directory.
        step: the step at which the run resumes.
        report: called with a one-line message if the logger fails.
        mode: online, offline (`wandb sync` sends it later) or disabled.
        options: further arguments of `wandb.init`: project, entity, name, tags, ...
    """

    name = "wandb"
    module = "wandb"
    package = "wandb"
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
        self._logged = wandb.init(id=identity, resume="allow", dir=str(self.run.path), **self._options)
        self._next = int(self._logged.step)

    def log(self, step: int, values: dict[str, float]) -> None:
        if step >= self._next:
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
        """W&B sends by itself."""

    def end(self) -> None:
        self._logged.finish()
