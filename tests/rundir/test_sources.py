"""The user's files that a run depends on are found without running them, and their changes are named."""

from __future__ import annotations

import sys
import time
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from runner.rundir import provenance
from runner.rundir.sources import UNREADABLE, Sources, named_targets
from runner.system import files

CONFIG: dict[str, Any] = {
    "model": {"_target_": "model.Net"},
    "data": {"sources": {"a": {"_target_": "pack.sub.data.Data"}}, "eval_sources": {}},
    "callbacks": {"x": [{"_target_": "torch.nn.Linear"}, {"_target_": "runner.data.text.TextFiles"}]},
}
FILES = {
    "model.py": "raise SystemExit('imported')\nimport os, torch, layers\nfrom tools import act, missing\n",
    "layers.py": "def f():\n    import pack.late\n",
    "tools/act.py": "import model\n",  # tools has no __init__.py
    "pack/__init__.py": "",
    "pack/late.py": "def broken(:\n",
    "pack/sub/__init__.py": "from . import near\n",
    "pack/sub/near.py": "from ..far import *\n",
    "pack/sub/data.py": "from .near import x as y\n",
    "pack/far.py": "",
    "unused.py": "",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `FILES` the current directory, without git and first on Python's path."""
    for name, text in FILES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    return tmp_path / "project"


def found(config: dict[str, Any]) -> dict[str, str]:
    return Sources().of(named_targets(config))


def freeze(run: Path, config: dict[str, Any] = CONFIG) -> Path:
    run.mkdir(exist_ok=True)
    provenance.write_code(run / "code.json", provenance.describe_code(config), [])
    return run


def test_named_code_and_its_imports_are_found(project: Path) -> None:
    assert sorted(found(CONFIG)) == sorted(FILES.keys() - {"unused.py"})
    assert not {"model", "layers", "pack"} & sys.modules.keys()


def test_packages_and_stdlib_are_not_the_users_own(project: Path) -> None:
    config = {"a": {"_target_": "torch.nn.Linear"}, "b": {"_target_": "json.loads"}, "c": {"_target_": "launch.x.Y"}}
    assert found(config | {"d": {"_target_": "no_such_module.X"}, "e": {"_target_": "not a name"}}) == {}


def test_changed_new_and_missing_files_are_named(project: Path, tmp_path: Path) -> None:
    run = freeze(tmp_path / "run")
    assert provenance.code_changes(run) == []
    (project / "unused.py").write_text("x = 1\n")
    assert provenance.code_changes(run) == []
    (project / "pack/far.py").write_text("x = 1\n")
    (project / "layers.py").write_text("import unused\n")
    assert provenance.code_changes(run) == ["layers.py", "pack/far.py", "pack/late.py (gone)", "unused.py (new)"]


def test_run_continued_from_elsewhere_has_the_same_files(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = freeze(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert provenance.code_changes(run) == []
    (project / "model.py").write_text("")
    assert "model.py" in provenance.code_changes(run)


def test_a_copy_of_the_project_has_the_same_files(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = freeze(tmp_path / "run")
    project.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    monkeypatch.syspath_prepend(str(tmp_path / "moved"))
    assert provenance.code_changes(run) == []


def test_extension_is_left_out_of_the_digests(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / f"fast{EXTENSION_SUFFIXES[0]}").write_text("")
    assert found({"model": {"_target_": "fast.Net"}}) == {}

    def refused(path: Path) -> bytes:
        raise PermissionError(path)

    monkeypatch.setattr(files, "read_bytes", refused)
    assert found({"model": {"_target_": "model.Net"}}) == {"model.py": UNREADABLE}


def test_a_config_with_other_targets_is_no_change_of_the_code(project: Path, tmp_path: Path) -> None:
    run = freeze(tmp_path / "run", {"model": CONFIG["model"]})
    assert provenance.code_changes(run, provenance.describe_code(CONFIG)) == []


def test_a_thousand_configs_are_looked_at_once(project: Path) -> None:
    sources, began = Sources(), time.process_time()
    for seed in range(1000):
        assert len(sources.of(named_targets({**CONFIG, "seed": seed}))) == 9
    assert time.process_time() - began < 0.5
