"""code.json: with which code a run was started, and what has changed since.

Imports neither torch nor hydra. Works without git, and outside of a repository.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from runner.files import read_object, write_json
from runner.run_dir import RunDir

# What decides on numbers; the versions of other packages do not.
PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "submitit", "safetensors")
GIT_TIMEOUT_S = 10.0
MAX_DIFF = 1 << 20  # characters kept; the digest is of the whole


def record() -> dict[str, Any]:
    """The code as it is now: of the current directory's repository and of this package's own."""
    own = Path(__file__).resolve().parent
    return {
        "time": time.time(),
        "command": sys.argv,
        "directory": os.getcwd(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "runner": {"source": str(own), "digest": _source_digest(own)},
        "repositories": _repositories([Path.cwd(), own]),
    }


def write(path: Path, code: dict[str, Any], overrides: Sequence[str]) -> None:
    """Write code.json; of an earlier submission of the run, what tells its code is kept in `earlier`."""
    before = read_object(path)
    kept = [*before.get("earlier", []), _short(before)] if before else []
    write_json(path, {"overrides": list(overrides), **code, "earlier": kept})


def changed_since(run_dir: Path) -> list[str]:
    """How the code differs from the one the run was started with, a line for each difference."""
    before = read_object(RunDir(run_dir).code)
    if not before:
        return []
    now = record()
    lines = [f"{name} {before.get(name)} -> {now[name]}" for name in ("python",) if before.get(name) != now[name]]
    packages = before.get("packages", {})
    for name in PACKAGES:
        old, new = packages.get(name), now["packages"].get(name)
        if old != new:
            lines.append(f"{name} {old or '(absent)'} -> {new or '(absent)'}")
    if before.get("runner", {}).get("digest") != now["runner"]["digest"]:
        lines.append(f"the source of runner in {now['runner']['source']} has changed")
    # The job may have been started elsewhere: only the repositories that were looked at then are compared.
    roots = [Path(root) for root in before.get("repositories", {})]
    for root, new in _repositories([path for path in roots if path.is_dir()]).items():
        old = before["repositories"][root]
        if old["commit"] != new["commit"]:
            lines.append(f"commit of {root}: {old['commit'][:12]} -> {new['commit'][:12]}")
        elif old["diff_digest"] != new["diff_digest"]:
            lines.append(f"uncommitted changes in {root} are not what they were")
    return lines


def _short(code: dict[str, Any]) -> dict[str, Any]:
    repositories = {root: repository["commit"] for root, repository in code.get("repositories", {}).items()}
    return {"time": code.get("time"), "overrides": code.get("overrides"), "commits": repositories}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _source_digest(folder: Path) -> str:
    """Digest of the Python files in `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _repositories(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Root -> commit, diff and untracked files of the git repositories that hold `folders`."""
    roots = {root for folder in folders if (root := _root(folder))}
    found = {}
    for root in sorted(roots):
        questions = (["rev-parse", "HEAD"], ["diff", "HEAD", "--no-ext-diff"], ["status", "--porcelain"])
        asked = [_git(root, *question) for question in questions]
        commit, diff, status = (_answer(process) for process in asked)
        if commit is None:
            continue
        untracked = [line[3:] for line in (status or "").splitlines() if line.startswith("??")]
        found[str(root)] = {
            "commit": commit.strip(),
            "diff": (diff or "")[:MAX_DIFF],
            "diff_digest": hashlib.sha256((diff or "").encode()).hexdigest()[:16],
            "untracked": untracked,
        }
    return found


def _root(folder: Path) -> Path | None:
    return next((path for path in (folder, *folder.parents) if (path / ".git").exists()), None)


def _git(root: Path, *arguments: str) -> subprocess.Popen[bytes] | None:
    # A diff that only updates git's own index must not wait for, or take, its lock.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None


def _answer(process: subprocess.Popen[bytes] | None) -> str | None:
    if process is None:
        return None
    try:
        output, _ = process.communicate(timeout=GIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    return output.decode(errors="replace") if process.returncode == 0 else None
