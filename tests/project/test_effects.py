"""Effects go through `runner.system`, so that one patch there replaces the clock or the file system.

The rule is held for whole packages. Looking at a path (`exists`, `is_dir`, `is_file`, `stat`, `resolve`) is allowed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "runner/rundir",
    "runner/checkpoint",
    "runner/cli",
    "runner/training",
    "runner/metrics",
    "runner/config",
    "launch",
)
"""Packages that keep the rule. data, chaos and models are exempt; `runner/system` is the layer itself."""

EXCEPTIONS: dict[str, str] = {}
"""`file: effect` -> why it does not go through the system layer."""

EFFECTS = {
    "os": """
        chmod close fdopen fsync link listdir lseek makedirs mkdir open read readlink remove removedirs rename renames
        replace rmdir scandir symlink sync truncate unlink utime walk write
        abort execv execve execvp fork kill killpg popen posix_spawn spawnv system waitpid
    """.split(),
    "time": "monotonic monotonic_ns perf_counter perf_counter_ns sleep time time_ns".split(),
    "subprocess": "Popen call check_call check_output getoutput getstatusoutput run".split(),
    "shutil": "copy copy2 copyfile copytree move rmtree".split(),
    "tempfile": "NamedTemporaryFile TemporaryDirectory TemporaryFile mkdtemp mkstemp".split(),
    "signal": "alarm pthread_kill raise_signal set_wakeup_fd setitimer signal".split(),
}
PATH_METHODS = """
    chmod glob hardlink_to iterdir mkdir read_bytes read_text rename rglob rmdir symlink_to touch unlink write_bytes
    write_text
""".split()
SYSTEM = ("files", "clock", "processes", "scheduler")


def effects(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) for each effect that does not go through the system layer."""
    hints = {node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript)}  # subprocess.Popen[bytes]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            yield from (
                (node.lineno, f"{node.module}.{name}") for name in names if name in EFFECTS.get(node.module or "", ())
            )
            if node.module in ("runner.system.files", "runner.system.clock", "runner.system.processes"):
                yield node.lineno, f"from {node.module}"  # a patch of the module would not reach these names
        elif isinstance(node, ast.Attribute) and node not in hints:
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in EFFECTS.get(owner, ()):
                yield node.lineno, f"{owner}.{node.attr}"
            elif node.attr in PATH_METHODS and owner not in SYSTEM:
                yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.Call) and _opens(node):
            yield node.lineno, "open"


def _opens(call: ast.Call) -> bool:
    """`open(...)`, and `path.open(...)` with a mode: many other things can be opened."""
    if isinstance(call.func, ast.Name):
        return call.func.id == "open"
    modes = [argument.value for argument in call.args[:1] if isinstance(argument, ast.Constant)]
    is_open = isinstance(call.func, ast.Attribute) and call.func.attr == "open"
    return is_open and any(re.fullmatch("[rwaxbt+]+", str(mode)) for mode in modes)


def found() -> dict[str, int]:
    """`file: effect` -> line, over all packages."""
    return {
        f"{path.relative_to(ROOT)}: {what}": line
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, what in effects(ast.parse(path.read_text()))
    }


def test_effects_go_through_the_doors() -> None:
    outside = [f"{effect} (line {line})" for effect, line in found().items() if effect not in EXCEPTIONS]
    assert not outside, "\n".join(outside)


def test_every_exception_is_still_needed() -> None:
    assert EXCEPTIONS.keys() <= found().keys()


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("time.sleep(1)", "time.sleep"),
        ("def f(clock=time.monotonic): ...", "time.monotonic"),
        ("def f():\n    from subprocess import run", "subprocess.run"),
        ("subprocess.Popen([])", "subprocess.Popen"),
        ("from runner.system.files import write_json", "from runner.system.files"),
        ("open('x')", "open"),
        ("path.open('wb')", "open"),
        ("os.kill(1, 2)", "os.kill"),
        ("move = os.replace", "os.replace"),
        ("signal.signal(1, f)", "signal.signal"),
        ("(path / 'x').mkdir()", ".mkdir"),
    ],
)
def test_an_effect_is_found(source: str, what: str) -> None:
    assert [name for _, name in effects(ast.parse(source))] == [what]


@pytest.mark.parametrize(
    "source",
    [
        "from runner.system import clock, files\nfiles.rename(a, b)\nfiles.touch(p)\nclock.sleep(1)",
        "path.exists() and path.stat() and os.path.join(a, b)",
        "text.replace('a', 'b')",
        "Session.open(run, config)",
        "signal.SIGTERM",
        "def f(process: subprocess.Popen[bytes]): ...",
        "shutil.which('git')",
    ],
)
def test_what_is_allowed_is_not_found(source: str) -> None:
    assert list(effects(ast.parse(source))) == []
