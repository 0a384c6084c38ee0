"""Check that effects go through `runner.system`, so that one patch replaces the clock, the files or the processes.

The rule holds for whole packages, and looking at a path is an effect, too. Functions that only read the current
directory or the home directory (`absolute`, `abspath`, `cwd`, `expanduser`) are allowed.
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
"""Packages that follow the rule. data, chaos, report and models are exempt. `runner/system` is the layer."""

EXCEPTIONS = {
    "runner/checkpoint/tensors/writer.py: threading.Lock at import": "held during an import, through no door",
    "runner/cli/base/show.py: .resolve": "an option of the command",
    "runner/config/composition.py: os.environ": "a variable of Hydra's, which reads it itself",
    "runner/config/search_path.py: .is_dir": "where the installed config files are, which Hydra reads itself",
    "runner/config/search_path.py: .resolve": "where the installed config files are, which Hydra reads itself",
    "runner/config/tree.py: .is_dir": "directories of config files, which Hydra reads itself",
    "runner/config/tree.py: .resolve": "directories of config files, which Hydra reads itself",
}
"""`file: effect` -> the reason why it does not go through the system layer."""

EFFECTS = {
    "os": """
        access chmod chown close copy_file_range dup dup2 fchmod fdatasync fdopen fstat fsync ftruncate fwalk getxattr
        link listdir lseek lstat makedirs mkdir mkfifo open posix_fadvise pread pwrite read readlink remove removedirs
        rename renames replace rmdir scandir setxattr stat statvfs symlink sync truncate umask unlink utime walk write
        _exit abort execv execve execvp fork kill killpg popen posix_spawn spawnv system waitpid
        environ environb getegid getenv geteuid getgid getlogin getpid getppid getuid putenv uname unsetenv
    """.split(),
    "os.path": "exists getatime getctime getmtime getsize isdir isfile islink ismount lexists realpath".split(),
    "time": "monotonic monotonic_ns perf_counter perf_counter_ns sleep time time_ns".split(),
    "subprocess": "Popen call check_call check_output getoutput getstatusoutput run".split(),
    "shutil": "copy copy2 copyfile copytree disk_usage move rmtree which".split(),
    "socket": "getfqdn gethostname".split(),
    "fcntl": "fcntl flock ioctl lockf".split(),
    "platform": "node uname".split(),
    "tempfile": "NamedTemporaryFile TemporaryDirectory TemporaryFile mkdtemp mkstemp".split(),
    "signal": "alarm pthread_kill raise_signal set_wakeup_fd setitimer".split(),
}
PATH_METHODS = """
    chmod exists glob hardlink_to is_block_device is_char_device is_dir is_fifo is_file is_mount is_socket is_symlink
    iterdir lstat mkdir read_bytes read_text readlink rename resolve rglob rmdir samefile stat symlink_to touch unlink
    write_bytes write_text
""".split()
DOORS = ("files", "clock", "processes")
SYSTEM = (*DOORS, "scheduler")
REPLACED = (*DOORS, "threading", "queue")
"""Modules that a simulated world replaces."""


def effects(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each effect that does not go through the system layer."""
    nodes = list(ast.walk(tree))
    subscripted = [node.value for node in nodes if isinstance(node, ast.Subscript)]
    hints = [node for node in subscripted if _dotted(node) == "subprocess.Popen"]  # subprocess.Popen[bytes]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = node.module or ""
            yield from ((node.lineno, f"{module}.{name}") for name in names if _is_effect(module, name))
            if module in [f"runner.system.{name}" for name in DOORS]:
                yield node.lineno, f"from {module}"  # a patch of the module would not reach these names
        elif isinstance(node, ast.Attribute) and node not in hints:
            owner = _dotted(node.value)
            if _is_effect(owner, node.attr):
                yield node.lineno, f"{owner}.{node.attr}"
            elif node.attr in PATH_METHODS and owner not in SYSTEM:
                yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.Call) and _opens(node):
            yield node.lineno, "open"


def _dotted(node: ast.AST) -> str:
    """Return a name such as `os.path` or `os`, or "" for a longer or other expression."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Name(name), attribute):
            return f"{name}.{attribute}"
    return ""


def _is_effect(module: str, name: str) -> bool:
    return name in EFFECTS.get(module, ())


def captured(node: ast.AST, *, importing: bool = True) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each replaceable function or class that is looked up at import.

    A later replacement would not reach the default of an argument or field, or a name of the module.
    """
    evaluated = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        for statement in node.body if isinstance(node.body, list) else [node.body]:
            yield from captured(statement, importing=False)
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        # Decorators and defaults of an inner function are evaluated at each call of the outer one.
        evaluated = [*defaults, *getattr(node, "decorator_list", [])]
    elif isinstance(node, ast.AnnAssign):  # annotations are not evaluated
        evaluated = [node.value] if node.value else []
    elif importing and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        is_constant = node.attr.isupper()
        if node.value.id in REPLACED and not is_constant:
            yield node.lineno, f"{node.value.id}.{node.attr} at import"
    for each in evaluated:
        yield from captured(each, importing=importing)


def _opens(call: ast.Call) -> bool:
    """Return whether a call is `open(...)` or `path.open(...)` with a mode. Many other things can be opened."""
    if isinstance(call.func, ast.Name):
        return call.func.id == "open"
    modes = [argument.value for argument in call.args[:1] if isinstance(argument, ast.Constant)]
    is_open = isinstance(call.func, ast.Attribute) and call.func.attr == "open"
    return is_open and any(re.fullmatch("[rwaxbt+]+", str(mode)) for mode in modes)


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    """Return `file: effect` -> line over all packages."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {
        f"{path.relative_to(ROOT)}: {what}": line
        for path, tree in [(path, ast.parse(path.read_text())) for path in paths]
        for look in (effects, captured)
        for line, what in look(tree)
    }


def test_effects_go_through_the_system_layer(found: dict[str, int]) -> None:
    outside = [f"{effect} (line {line})" for effect, line in found.items() if effect not in EXCEPTIONS]
    assert not outside, "\n".join(outside)


def test_every_exception_is_still_needed(found: dict[str, int]) -> None:
    assert EXCEPTIONS.keys() <= found.keys()


PRIMITIVES = ("this_thread", "begin_writeback", "append_from_now_on", "resolve", "has_access_list")
"""Functions of `files` that do more than rename a function of Python."""


def test_files_module_is_built_on_its_primitives() -> None:
    """Check that a file system that replaces the primitives has replaced everything."""
    entries = [".is_file", ".is_dir"]  # methods of the entries that `scan` yields, in `kinds`
    outside = []
    for statement in ast.parse((ROOT / "runner" / "system" / "files.py").read_text()).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.Attribute, ast.Name)):
            continue  # such as `rename = os.replace`
        name = getattr(statement, "name", "")
        if name not in PRIMITIVES:
            outside += [(name, what) for _, what in effects(statement) if name != "kinds" or what not in entries]
    assert outside == []


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
        ("(path / 'x').mkdir()", ".mkdir"),
        ("path.exists()", ".exists"),
        ("(path / 'x').is_symlink()", ".is_symlink"),
        ("Path(text).resolve()", ".resolve"),
        ("os.path.lexists(path)", "os.path.lexists"),
        ("os.environ['RANK']", "os.environ"),
        ("os.getpid()", "os.getpid"),
        ("socket.gethostname()", "socket.gethostname"),
        ("shutil.which('git')", "shutil.which"),
    ],
)
def test_an_effect_is_found(source: str, what: str) -> None:
    assert [name for _, name in effects(ast.parse(source))] == [what]


@pytest.mark.parametrize(
    "source",
    [
        "from runner.system import clock, files\nfiles.rename(a, b)\nfiles.touch(p)\nclock.sleep(1)",
        "files.exists(path) and files.stat(path) and os.path.join(a, b)",
        "threading.Thread(target=f)",
        "path.absolute()",
        "text.replace('a', 'b')",
        "Session.open(run, config)",
        "signal.SIGTERM",
        "def f(process: subprocess.Popen[bytes]): ...",
    ],
)
def test_allowed_calls_are_not_reported(source: str) -> None:
    assert list(effects(ast.parse(source))) == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("def f(sleep=clock.sleep): ...", ["clock.sleep at import"]),
        ("class A:\n    lock: object = field(default_factory=threading.RLock)", ["threading.RLock at import"]),
        ("class A:\n    lock: object = field(default_factory=lambda: threading.RLock())", []),
        ("class A:\n    lock: threading.RLock", []),
        ("class A:\n    def f(self, now=clock.monotonic): ...", ["clock.monotonic at import"]),
        ("rename = files.rename", ["files.rename at import"]),
        ("class A(threading.Thread): ...", ["threading.Thread at import"]),
        ("mode = files.OWNED", []),
        ("def f():\n    return lambda now=clock.monotonic: now()", []),
        ("def f():\n    clock.sleep(1)", []),
    ],
)
def test_capture_at_import_is_found(source: str, what: list[str]) -> None:
    assert [name for _, name in captured(ast.parse(source))] == what
