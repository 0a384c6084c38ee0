"""The doctor's measurements before a submission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import TINY

from runner.checkpoint import TrainStateManager
from runner.cli.doctor.doctor import _cache_findings, measure_save
from runner.config.composition import compose
from runner.system import clock

pytestmark = pytest.mark.slow


def test_the_save_that_is_timed_is_not_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save of a process imports modules, which takes far longer than the save."""
    now, durations, sizes, save = [0.0], iter([7.8, 0.2]), [], TrainStateManager.save

    def timed(self: TrainStateManager, *arguments: Any, **options: Any) -> None:
        now[0] += next(durations)
        save(self, *arguments, **options)
        sizes.append(sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file()))

    monkeypatch.setattr(TrainStateManager, "save", timed)
    monkeypatch.setattr(clock, "perf_counter", lambda: now[0])
    measured = measure_save(compose([*TINY, "checkpoint.mode=sync", f"run.root={tmp_path}"]).config, tmp_path)
    assert measured.seconds == pytest.approx(0.2)
    assert next(durations, None) is None
    assert measured.bytes == pytest.approx(sizes[0], rel=0.1)  # of one checkpoint


@pytest.mark.parametrize(("cache", "warned"), [("/proc/self/cache", True), ("{here}/cache", False)])
def test_a_cache_that_nodes_may_not_have_is_a_warning(tmp_path: Path, cache: str, warned: bool) -> None:
    """Nodes have the directory of the runs, and perhaps no home directory."""
    config = compose([*TINY, f"data.cache_dir={cache.format(here=tmp_path)}"]).config
    assert ["data.cache_dir" in str(each.remedy) for each in _cache_findings(config, tmp_path)] == [True] * warned
