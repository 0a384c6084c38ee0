"""What is installed is what was tested: every package and config file is in the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from runner.conf_tree import conf_dir, groups

ROOT = Path(__file__).resolve().parent.parent


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("runner", "launch")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert listed - {"runner.conf"} == present


@pytest.mark.slow
def test_wheel_has_the_configs_and_runs_from_any_directory(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("runner", "launch", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    built = [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(built, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True)

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    where = "from runner import conf_tree as t; print(t.conf_dir()); print(t.groups([t.conf_dir()]))"
    directory, found = python("-c", where).splitlines()
    assert Path(directory) == site / "runner" / "conf"
    assert found == str(groups([conf_dir()]))
    assert "kind: mixture" in python("-m", "runner", "data=mixture", "--cfg", "job")
    assert (site / "bin" / "runner").exists()
