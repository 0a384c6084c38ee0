"""Check that sdist and wheel hold every package, config file and script, and that the installed code works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import exactdata
import runner
from runner.config.search_path import conf_dir, groups

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]


@pytest.mark.parametrize(("project", "tops"), [("", ("runner", "launch")), ("exactdata", ("exactdata",))])
def test_every_package_is_listed(project: str, tops: tuple[str, ...]) -> None:
    described = tomllib.loads((ROOT / project / "pyproject.toml").read_text())
    present = {
        ".".join(path.parent.relative_to(ROOT).parts) for top in tops for path in (ROOT / top).rglob("__init__.py")
    }
    assert set(described["tool"]["setuptools"]["packages"]) - {"runner.conf"} == present


def test_nothing_takes_exactdata_from_an_index() -> None:
    """Check that the runner requires a version with a local part, which an index does not accept: PEP 440."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"exactdata=={exactdata.__version__}" in asked
    assert "+" in exactdata.__version__
    assert (ROOT / "exactdata/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_version_is_the_newest_in_the_changelog() -> None:
    versions = re.findall(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == runner.__version__


def unpacked_sdist(folder: Path, names: tuple[str, ...], root: Path, archive: str) -> Path:
    """Build and unpack the source distribution of a project, from which a wheel is built."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in names:
        if (root / name).is_dir():
            shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(root / name, source / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (found,) = folder.glob("*.tar.gz")
    assert found.name == archive
    (folder / "unpacked").mkdir()
    subprocess.run(["tar", "-xf", found, "-C", folder / "unpacked"], check=True)
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


def built(source: Path, folder: Path) -> Path:
    """Build the wheel of an unpacked source distribution."""
    build = [*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def data_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of exactdata."""
    folder = tmp_path_factory.mktemp("exactdata")
    names = tuple(path.name for path in (ROOT / "exactdata").iterdir() if path.suffix != ".egg-info")
    archive = f"exactdata-{exactdata.__version__}.tar.gz"
    source = unpacked_sdist(folder, tuple({*names} - {"__pycache__", "build"}), ROOT / "exactdata", archive)
    return built(source, folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of the runner."""
    folder = tmp_path_factory.mktemp("runner")
    names = ("runner", "launch", "conf", "pyproject.toml", "README.md", "LICENSE")
    return built(unpacked_sdist(folder, names, ROOT, f"preemptible_runner-{runner.__version__}.tar.gz"), folder)


def link_installed(names: list[str], site: Path) -> None:
    """Link distributions of this environment, with their requirements, into a folder of packages."""
    done: set[str] = set()
    while names:
        if (name := canonicalize_name(names.pop())) in done:
            continue
        done.add(name)
        found = metadata.distribution(name)
        required = [Requirement(text) for text in found.requires or []]
        names += [one.name for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
        for top in {path.parts[0] for path in found.files or [] if path.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))


CONFTEST = """from hypothesis import HealthCheck, settings
suppressed = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("alone", derandomize=True, deadline=None, max_examples=20, suppress_health_check=suppressed)
settings.load_profile("alone")
"""


def environment() -> dict[str, str]:
    """Return the environment for another Python, without the variables that lead to the clone."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}


@pytest.fixture(scope="module")
def alone(data_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with exactdata's wheel, its requirements and pytest, without the runner."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python3*/site-packages")
    link_installed(["torch", "numpy", "orjson", "xxhash", "pytest", "pytest-timeout", "hypothesis", "psutil"], site)
    install = ["--python", str(python), "install", "--no-index", str(data_wheel)]
    for arguments in (install, ["--python", str(python), "check"]):
        done = subprocess.run(
            [*PIP[:3], *arguments], cwd=folder, env=environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return python


def run_alone(alone: Path, folder: Path, *selected: str) -> str:
    """Run tests of exactdata with its wheel alone and return pytest's output."""
    shutil.copytree(ROOT / "tests" / "exactdata", folder / "exactdata_tests")
    for name in ("properties", "resume", "loading", "shards", "orders", "histories"):
        shutil.copy(ROOT / "tests" / "support" / f"{name}.py", folder)
    markers = "markers =\n    promise(shown): shown\n    slow: slow\n"
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = .\n{markers}")
    command = [str(alone), "-m", "pytest", "-q", "-p", "no:cacheprovider", *selected]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.promise("exactdata's wheel passes its tests alone, without the runner")
def test_the_wheel_of_exactdata_works_alone(alone: Path, tmp_path: Path) -> None:
    names = "runner", "launch", "hydra", "omegaconf", "submitit"
    missing = f"from importlib.util import find_spec; print([name for name in {names} if find_spec(name)])"
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True}
    found = subprocess.run([alone, "-c", missing], check=True, **options).stdout
    assert found == "[]\n"
    output = run_alone(alone, tmp_path, "exactdata_tests/test_trainer_loader.py", "exactdata_tests/test_readme.py")
    assert " passed" in output


@pytest.mark.slow
def test_more_tests_of_exactdata_pass_with_its_wheel_alone(alone: Path, tmp_path: Path) -> None:
    names = "elastic", "sampler", "datasets", "loader_resume", "loader_torch", "loader_lengths"
    files = [f"exactdata_tests/test_{name}.py" for name in names]
    assert " passed" in run_alone(alone, tmp_path, *files, "-m", "not promise and not slow", "-k", "not docs")


@pytest.mark.promise("the wheel, installed, trains in any directory")
def test_the_wheel_of_the_sdist_runs_from_any_directory(wheel: Path, data_wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [*PIP, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel), str(data_wheel)]
    subprocess.run(install, check=True)
    assert (site / "exactdata" / "py.typed").exists()

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
