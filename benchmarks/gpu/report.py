"""Write the report of a part: tables of figures, skipped steps with reasons, failures."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results


@dataclass
class Report:
    """The report of one process, written to its file after each step.

    Attributes:
        file: path of the report.
        device: name of the measured device.
        not_run: the steps that were not run, and the reasons.
        failed: the steps that failed, and their tracebacks.
    """

    file: Path
    device: str = ""
    not_run: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def step(self, name: str, action: Callable[[], object], unless: str = "") -> None:
        """Run one step. Record an error, so that the next step can run.

        Args:
            name: name of the step.
            action: the step.
            unless: reason why it cannot run here, if there is one.
        """
        began = time.perf_counter()
        if unless:
            self.not_run[name] = unless
            print(f"  {name}: not run: {unless}", flush=True)
        else:
            try:
                action()
            except Exception as error:  # noqa: BLE001 the other steps are worth having
                self.failed[name] = traceback.format_exc()
                print(f"  {name}: FAILED: {type(error).__name__}: {str(error)[:2000]}", file=sys.stderr, flush=True)
            else:
                print(f"  {name}: {time.perf_counter() - began:.1f} s", flush=True)
        self.write()

    def write(self, **more: Any) -> None:
        """Rewrite the file."""
        tables = {name: results.entry(found, self.device) for name, found in results.RECORDED.items() if found.figures}
        content = {"gpu": self.device, **more, "tables": tables, "not_run": self.not_run, "failed": self.failed}
        temporary = self.file.with_name(f"{self.file.name}.tmp")
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        temporary.replace(self.file)

    def add(self, part: str, file: Path, ended: str) -> None:
        """Merge the report that the process of a part has written.

        Args:
            part: name of the part.
            file: path of its report.
            ended: how the process failed, if it did.
        """
        content = json.loads(file.read_text()) if file.exists() else {"tables": {}, "not_run": {}, "failed": {}}
        for name, found in content["tables"].items():
            results.RECORDED[name] = results.read(found, name)
        self.not_run |= content["not_run"]
        self.failed |= content["failed"]
        if ended:
            self.failed[part] = ended

    def summary(self) -> Iterable[str]:
        """Yield a line for each missed goal, each step that was not run, and each failure."""
        for found in results.RECORDED.values():
            for each in found.figures:
                if each.missed:
                    yield f"missed: {found.name}: {each.row}, {each.column}: {each.shown} ({each.goal})"
        yield from (f"not run: {name}: {reason}" for name, reason in self.not_run.items())
        yield from (f"FAILED: {name}: {reason.strip().splitlines()[-1]}" for name, reason in self.failed.items())
