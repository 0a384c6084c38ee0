"""Record the code that a run was started with in code.json, and find what has changed since.

Works without git and outside a repository. Imports neither torch nor hydra.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import exactdata
from runner.errors import RunDirError
from runner.rundir.paths import RunDir
from runner.rundir.sources import Sources, changed_files, named_targets
from runner.system import clock, files, processes

# Packages that affect the results. The versions of other packages do not matter.
PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "submitit", "safetensors")
GIT_TIMEOUT_S = 10.0
NOTHING_FOUND = 1  # exit status of `git config`
MAX_DIFF = 1 << 20  # characters kept; the digest covers the complete diff

# A repository's configuration may name programs that git runs. Describing a repository must run none of them.
SAFE = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "diff.external=")
# `git diff` must not wait for the index lock. Missing objects must not be fetched, because a remote may be a program.
ENVIRONMENT = {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
# Variables that make git use a different repository (git sets some for hooks) or run a program. Variables that pass git
# settings are kept, because the user may list safe directories in them.
DROPPED = """
    GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_COMMON_DIR GIT_PREFIX
    GIT_NAMESPACE GIT_EXTERNAL_DIFF GIT_PAGER GIT_ASKPASS GIT_SSH GIT_SSH_COMMAND GIT_PROXY_COMMAND
""".split()
SAFE_DIFF = ("--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")


def describe_code(plain: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Describe the current code: this package, and the git repositories of this package and the current directory.

    Args:
        plain: the config whose source files are included.
    """
    package = _package()
    return {
        "time": clock.wall(),
        "command": sys.argv,
        "directory": os.getcwd(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "runner": {"source": str(package), "digest": _source_digest(package, _data_package())},
        "repositories": {str(root): found for root in _roots() if (found := _describe_repository(root))},
        **describe_sources(plain, Sources()),
    }


def describe_sources(plain: Mapping[str, Any], sources: Sources) -> dict[str, Any]:
    """Return the entries of code.json that depend on the config: its targets and the user's source files."""
    targets = named_targets(dict(plain))
    return {"targets": targets, "modules": sources.of(targets)}


def write_code(
    path: Path,
    code: dict[str, Any],
    overrides: Sequence[str],
    guard: files.Guard | None = None,
    edit: dict[str, Any] | None = None,
    config: str = "",
) -> None:
    """Write code.json, and keep the commits and overrides of earlier submissions in `earlier`.

    Args:
        path: the file.
        code: from `describe_code`.
        overrides: overrides of the command.
        guard: the right to change the run.
        edit: the change of settings that the command makes in an existing run, see `edits`.
        config: the new content of config.yaml, which is written after code.json.
    """
    before = files.read_object(path)
    earlier = before.get("earlier")
    kept = [*(earlier if isinstance(earlier, list) else []), _summary(before)] if before else []
    edited = [*_edits(before), *([edit] if edit else [])]
    configs = [_digest(config.encode())]
    with suppress(FileNotFoundError):  # accept the old digest too, because config.yaml is written last
        configs.append(_digest(files.read_regular(RunDir(path.parent).config)))
    described = {**code, "configs": configs, "earlier": kept, "edits": edited}
    files.write_json(path, {"overrides": list(overrides), **described}, guard=guard)


def check_config(run: RunDir) -> None:
    """Refuse a run whose config.yaml was edited by hand, because a resume would apply only part of the edit.

    Raises:
        RunDirError: config.yaml was edited by hand.
        OSError: it cannot be read.
    """
    if _is_as_written(run):
        return
    with suppress(OSError):  # this machine may still see an old version of one of the two files
        files.look_anew(run.path)
    if not _is_as_written(run):
        raise RunDirError(
            f"{run.config} was edited by hand, and training would follow only part of that: undo the edit; to change "
            f"settings, give them to a command: runner resume {run.path} key=value, or runner fork {run.path} --step N "
            "key=value"
        )


def _is_as_written(run: RunDir) -> bool:
    configs = files.read_object(run.code).get("configs")
    if not isinstance(configs, list):
        return True  # code.json is gone, or a program created the run
    return _digest(files.read_regular(run.config)) in configs


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def edits(run_dir: Path) -> list[dict[str, Any]]:
    """Return the changes that commands made to a run's settings, oldest first.

    Each has `step`, after which it applies, a description in `changes`, and the previous identity in `before`.

    Raises:
        OSError: code.json cannot be read.
    """
    return _edits(files.read_object(RunDir(run_dir).code))


def _edits(code: dict[str, Any]) -> list[dict[str, Any]]:
    found = code.get("edits")
    return [edit for edit in found if isinstance(edit, dict)] if isinstance(found, list) else []


def code_changes(run_dir: Path, now: Mapping[str, Any] | None = None, sources: Sources | None = None) -> list[str]:
    """List the differences from the code that the run was started with, one line each.

    Compare only repositories that contain the current directory or this package, so that git never runs in a directory
    named by a file. Compare the source files of the config that the run was started with, so that only code changes are
    listed.

    Args:
        run_dir: the run directory.
        now: from `describe_code`, if the caller has it.
        sources: a reader to share between several runs.
    """
    before = files.read_object(RunDir(run_dir).code)
    if not before:
        return []
    now = describe_code() if now is None else now
    changes = [] if before.get("python") == now["python"] else [f"python {before.get('python')} -> {now['python']}"]
    packages = object_in(before, "packages")
    for name in PACKAGES:
        old, new = packages.get(name), now["packages"].get(name)
        if old != new:
            changes.append(f"{name} {old or '(absent)'} -> {new or '(absent)'}")
    if object_in(before, "runner").get("digest") != now["runner"]["digest"]:
        changes.append(f"the source of runner in {now['runner']['source']} has changed")
    edited = _changed_files(before, sources or Sources())
    changes += edited
    repositories = object_in(before, "repositories")
    for root, new in now["repositories"].items():
        if root not in repositories:
            continue  # this attempt was started in another directory
        old = object_in(repositories, root)
        if old.get("commit") != new["commit"]:
            changes.append(f"commit of {root}: {old.get('commit')!s:.12} -> {new['commit'][:12]}")
        elif old.get("diff_digest") != new["diff_digest"] and not _are_within(root, edited):  # listed above
            changes.append(f"the uncommitted changes in {root} have changed")
    return changes


def _changed_files(before: Mapping[str, Any], sources: Sources) -> list[str]:
    targets, digests = before.get("targets"), before.get("modules")
    if not isinstance(targets, list) or not isinstance(digests, dict):
        return []  # started with an earlier version, which did not record source files
    now = sources.of([target for target in targets if isinstance(target, str)])
    return changed_files(digests, now, str(before.get("directory", "")))


def _are_within(root: str, edited: Sequence[str]) -> bool:
    """Check whether a line from `changed_files` names a file in a repository."""
    return any((Path.cwd() / line).is_relative_to(root) for line in edited)


def changes_at_start(run_dir: Path, since: float) -> list[str]:
    """Return the `code_changes` recorded by the command that last started the run, if it ran later than `since`."""
    code = files.read_object(RunDir(run_dir).code)
    changes, time = code.get("changes"), code.get("time")
    return list(changes) if isinstance(changes, list) and isinstance(time, float) and time > since else []


def code_facts(code: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that identify a run's code: commits, uncommitted changes and the user's source files."""
    found: dict[str, Any] = {"runner": object_in(code, "runner").get("digest")}
    for root, described in object_in(code, "repositories").items():
        if isinstance(described, dict):
            found[f"commit of {root}"] = str(described.get("commit"))[:12]
            found[f"uncommitted changes in {root}"] = (
                "none" if described.get("diff") == "" else described.get("diff_digest")
            )
    return found | {str(path): digest for path, digest in object_in(code, "modules").items()}


def environment_facts(code: Mapping[str, Any], attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts on the environment: Python, platform, packages at the last start; an attempt's node and ranks."""
    found = {"python": code.get("python"), "platform": code.get("platform"), **object_in(code, "packages")}
    return found | {key: attempt.get(key) for key in ("node", "ranks")}


def object_in(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object within a record, or {} if the entry is not an object, as an edit may have caused."""
    part = record.get(name)
    return part if isinstance(part, dict) else {}


def _summary(code: dict[str, Any]) -> dict[str, Any]:
    repositories = object_in(code, "repositories")
    commits = {root: object_in(repositories, root).get("commit") for root in repositories}
    return {"time": code.get("time"), "overrides": code.get("overrides"), "commits": commits}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _package() -> Path:
    return files.resolve(__file__).parents[1]


def _data_package() -> Path:
    return files.resolve(exactdata.__file__).parent


def _source_digest(*folders: Path) -> str:
    """Return a single digest of all Python files in `folders`."""
    digest = hashlib.sha256()
    for folder in folders:
        tree = files.walk(folder)
        sources = [Path(parent, name) for parent, _, names in tree for name in names if name.endswith(".py")]
        for path in sorted(filter(files.is_file, sources)):  # an editor may leave a dangling link
            digest.update(f"{path.relative_to(folder)}\0".encode() + files.read_bytes(path) + b"\0")
    return digest.hexdigest()[:16]


def _roots() -> list[Path]:
    """Return the git repositories that contain the current directory and this package."""
    found = set()
    for folder in (Path.cwd(), _package()):
        found.update([path for path in (folder, *folder.parents) if files.exists(path / ".git")][:1])
    return sorted(found)


def _describe_repository(root: Path) -> dict[str, Any] | None:
    """Return a repository's commit, diff and untracked files, or None if git cannot determine the commit."""
    filters = _own_filters(root)
    if filters is None or any("=" in key for key in filters):
        return None  # git's -c option cannot disable such a filter
    safe = [*SAFE, *(option for key in filters for option in ("-c", f"{key}="))]
    questions = (
        ("rev-parse", "HEAD"),
        ("diff", "HEAD", *SAFE_DIFF),
        ("status", "--porcelain", "--ignore-submodules=dirty"),
    )
    asked = [_start_git(root, *safe, *question) for question in questions]  # in parallel, as each may take seconds
    commit, diff, status = (_output(process) for process in asked)
    if commit is None:
        return None
    return {
        "commit": commit.strip(),
        "diff": (diff or "")[:MAX_DIFF],
        "diff_digest": hashlib.sha256((diff or "").encode()).hexdigest()[:16],
        "untracked": [line[3:] for line in (status or "").splitlines() if line.startswith("??")],
    }


def _own_filters(root: Path) -> list[str] | None:
    """Return the filter programs that the repository's (not the user's) configuration defines; None if git fails."""
    scopes = ["--local"]
    separate = _config(root, "--local", "--bool", "--get", "extensions.worktreeConfig")
    if separate == ["true"]:  # otherwise git refuses --worktree if there are several working trees
        scopes.append("--worktree")
    query = ("--includes", "--name-only", "--get-regexp", r"^filter\.")
    found = [separate, *(_config(root, scope, *query) for scope in scopes)]
    return None if None in found else [key for keys in found[1:] for key in keys or ()]


def _config(root: Path, *query: str) -> list[str] | None:
    """Return the lines printed by `git config` (possibly none), or None if it fails."""
    process = _start_git(root, "config", *query)
    output = _output(process)
    if output is None and (process is None or process.returncode != NOTHING_FOUND):
        return None
    return (output or "").splitlines()


def _start_git(root: Path, *arguments: str) -> processes.Process[bytes] | None:
    """Start a git command; return None if git is not installed."""
    environment = {name: value for name, value in processes.environment.items() if name not in DROPPED} | ENVIRONMENT
    command = ["git", "-C", str(root), *arguments]
    try:
        return processes.start(
            command, env=environment, stdin=processes.DEVNULL, stdout=processes.PIPE, stderr=processes.DEVNULL
        )
    except OSError:
        return None


def _output(process: processes.Process[bytes] | None) -> str | None:
    if process is None:
        return None
    try:
        output, _ = process.communicate(timeout=GIT_TIMEOUT_S)
    except processes.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    return output.decode(errors="replace") if process.returncode == 0 else None
