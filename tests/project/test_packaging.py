"""What is installed is what was tested: sdist and wheel hold every package, config file and script."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import runner
from runner.config.search_path import conf_dir, groups

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("runner", "launch")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert listed - {"runner.conf"} == present


def test_the_version_is_the_newest_in_the_changelog() -> None:
    versions = re.findall(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == runner.__version__


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked: what a wheel is built from."""
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    source.mkdir()
    for name in ("runner", "launch", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    assert archive.name == f"preemptible_runner-{runner.__version__}.tar.gz"
    (folder / "unpacked").mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", folder / "unpacked"], check=True)
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.mark.promise("the wheel, installed, trains in any directory")
def test_the_wheel_of_the_sdist_runs_from_any_directory(sdist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    build = [*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(tmp_path), str(sdist)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True)

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    where = "from runner.config import search_path as s; print(s.conf_dir()); print(s.groups([s.conf_dir()]))"
    directory, found = python("-c", where).splitlines()
    assert Path(directory) == site / "runner" / "conf"
    assert found == str(groups([conf_dir()]))
    assert "kind: mixture" in python("-m", "runner", "data=mixture", "--cfg", "job")
    assert (site / "bin" / "runner").exists()
    assert sorted(path.name for path in (ROOT / "launch").iterdir() if path.is_file()) == sorted(
        path.name for path in (site / "launch").iterdir() if path.is_file()
    )
    done = python("-m", "runner", "experiment=smoke", "train.steps=2", "run.dir=run")
    assert "finished: 2 steps" in done
    assert "finished" in python("-m", "runner", "status", ".")
    python("-m", "runner", "init", "project")
    written = [path for path in (tmp_path / "project").rglob("*") if path.is_file()]
    assert len(written) == len(list((ROOT / "runner/cli/start/project").rglob("*.template")))
