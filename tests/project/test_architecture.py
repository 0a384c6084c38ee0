"""docs/architecture.md and the import statements say the same; imports go one way; quick commands stay quick.

The page is the rule: its picture of the layers, its tables of modules and of libraries are read here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
OWN = ("runner", "launch")
# Nobody waits for torch to read the status of a run. `inspect` calculates, and so needs numpy.
WITHOUT_TORCH = """
    runner.errors runner.contracts runner.__main__ runner.system.files runner.system.clock runner.system.processes
    runner.system.signals runner.system.distributed runner.rundir.paths runner.rundir.lease runner.rundir.attempt_log
    runner.rundir.submitted_jobs runner.rundir.provenance runner.config.schema runner.config.schedule
    runner.config.search_path runner.cli.help runner.cli.status runner.cli.checkpoints runner.training.attempt
    runner.training.job runner.data.order.batch_shape runner.checkpoint.directory launch.slurm launch.local
""".split()


@cache
def modules() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    found = {}
    for path in sorted(path for top in OWN for path in (ROOT / top).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _statements(node: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """The import statements below `node`, in functions too, but not those for type checkers alone."""
    found: list[ast.Import | ast.ImportFrom] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            found.append(child)
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            found.extend(_statements(child))
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """The modules that `module` imports: its own project's by their full names, others by their top name."""
    found: set[str] = set()
    for statement in _statements(ast.parse(modules()[module].read_text())):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        else:
            assert statement.module, f"{module}: relative imports are not used here"
            inner = [f"{statement.module}.{alias.name}" for alias in statement.names]
            names = [name if name in modules() else statement.module for name in inner]
        found.update(name if name.split(".")[0] in OWN else name.split(".")[0] for name in names)
    return frozenset(found - {module})


def layers() -> list[list[str]]:
    """The layers of the page's picture, top to bottom: names of modules and packages below `runner`."""
    (picture,) = re.findall(r"<!-- layers -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.split()[1:] for line in picture.splitlines() if re.match(r"[a-z]", line)]
    return [[name for name in line if name.isidentifier()] for line in lines]


def box(module: str) -> str:
    """The name in the picture that a module of `runner` belongs to; empty for the package itself."""
    return [*module.split("."), ""][1]


def test_every_module_is_in_the_picture_and_nothing_else() -> None:
    drawn = [name for layer in layers() for name in layer]
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {box(name) for name in modules() if name.startswith("runner.")}


@pytest.mark.parametrize("module", [name for name in modules() if name.startswith("runner.")])
def test_imports_go_down_the_layers(module: str) -> None:
    """And the boxes of the layer `parts` know nothing of each other."""
    drawn = layers()
    level = {name: height for height, layer in enumerate(drawn) for name in layer}
    (parts,) = [height for height, layer in enumerate(drawn) if "checkpoint" in layer]
    mine = box(module)
    for imported in imports(module):
        other = box(imported)
        if not imported.startswith("runner") or other in ("", mine):
            continue
        assert level[other] >= level[mine], f"{module} imports {imported} from a layer above it"
        assert level[other] > parts or level[mine] != parts, f"{module} imports {imported}, a part beside it"


def test_no_module_imports_itself_by_a_detour() -> None:
    TopologicalSorter({module: imports(module) for module in modules()}).prepare()  # raises CycleError


# What `launch` may know of `runner`: shapes, mistakes, paths of a run, and the system layer.
SHARED = ("runner.contracts", "runner.errors", "runner.rundir.paths", "runner.system.")


def test_runner_never_imports_launch_and_launch_only_what_both_share() -> None:
    for module in modules():
        for name in imports(module):
            if module.startswith("runner"):
                assert not name.startswith("launch"), f"{module} imports {name}"
            elif name.startswith("runner"):
                assert name.startswith(SHARED), f"{module} imports {name}"


def test_every_module_has_its_line() -> None:
    told = dict(re.findall(r"^\| `((?:runner|launch)/\S+\.py)` \| (.+) \|$", PAGE, re.MULTILINE))
    present = {path.relative_to(ROOT).as_posix() for path in modules().values() if path.read_text().count("\n") > 5}
    assert present - told.keys() == set(), "give them a line in docs/architecture.md"
    assert {name for name in told if not (ROOT / name).exists()} == set(), "docs/architecture.md names what is gone"


def test_libraries_are_imported_where_the_page_says() -> None:
    """Hydra and OmegaConf above all: below the composition there are plain dataclasses."""
    used: dict[str, set[str]] = {}
    for module, path in modules().items():
        for name in imports(module):
            if name not in sys.stdlib_module_names and name.split(".")[0] not in (*OWN, "torch", "numpy"):
                used.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    told = {
        library: set(re.findall(r"`([^`]+)`", places))
        for libraries, places in re.findall(r"^\| (`[a-z`, ]+`) \| ((?:`\S+\.py`(?:, )?)+) \|$", PAGE, re.MULTILINE)
        for library in re.findall(r"`(\w+)`", libraries)
    }
    assert used == told


def _fresh(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_needs_no_torch_imports_none(tmp_path: Path) -> None:
    """Nor numpy, hydra or omegaconf: as a whole, whatever these modules import in turn."""
    program = f"""
import importlib, sys
for name in {WITHOUT_TORCH!r}:
    importlib.import_module(name)
from runner.cli import status
status.main([sys.argv[1], "--json"])
print("heavy:", sorted({{"torch", "numpy", "hydra", "omegaconf", "submitit"}} & sys.modules.keys()))
"""
    assert _fresh(program, str(tmp_path)).endswith("heavy: []\n")


def test_inspect_imports_neither_torch_nor_hydra() -> None:
    heavy = "{'torch', 'hydra', 'omegaconf', 'submitit'}"
    assert _fresh(f"import sys, runner.cli.inspect; print({heavy} & sys.modules.keys())") == "set()\n"
