"""Check that imports go one way, that libraries are imported in few places, and that quick commands stay quick.

The rule is the picture of the layers in docs/project/architecture.md, which this test reads.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = ("exactdata", "runner", "launch")
# `launch` may import from `runner`: shapes, errors, paths of a run, its writers, and the system layer.
SHARED = (
    *("runner.contracts", "runner.errors", "runner.rundir.paths", "runner.rundir.state", "runner.rundir.trust"),
    "runner.system.",
)
# Below the composition, configs are plain dataclasses.
HOMES = {"hydra": "runner.config.", "omegaconf": "runner.config.", "submitit": "launch.batch"}
# Reading the status of a run must not wait for torch. `inspect` calculates, and so needs numpy.
WITHOUT_TORCH = """
    runner.errors runner.contracts runner.__main__ runner.system.files runner.system.clock runner.system.processes
    runner.system.signals runner.system.distributed runner.rundir.paths runner.rundir.lease runner.rundir.attempt_log
    runner.rundir.submitted_jobs runner.rundir.provenance runner.config.schema runner.config.schedule
    runner.config.search_path runner.cli.base.help runner.cli.look.status runner.cli.look.show
    runner.cli.look.logs runner.cli.runs.cancel runner.cli.runs.checkpoints runner.training.attempt runner.training.job
    exactdata.order.batch_shape exactdata.samplers runner.checkpoint.files.directory launch.slurm launch.local
""".split()
Imports = Mapping[str, Collection[str]]


def modules() -> dict[str, Path]:
    """Return every module of the project by its dotted name."""
    found = {}
    for path in sorted(path for top in OWN for path in (ROOT / top).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(source: str, types: bool = False) -> Iterator[str]:
    """Yield the names that code imports, in functions too. With `types`, include imports for type checkers.

    `from a import b` yields `a.b`. `import_module(f"a.{b}")` yields `a`, because the rest is known at run time only.
    """
    calls = re.search("import_module|__import__", source)  # most modules have none, so their expressions are skipped
    nodes: list[ast.AST] = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.expr) and not calls:
            continue
        match node:
            case ast.If(test=ast.Name("TYPE_CHECKING")) if not types:
                continue
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                assert node.module, "relative imports are not used here"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            case ast.Call(
                func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(name)) | ast.JoinedStr([ast.Constant(str(name)), *_]), *_],
            ):
                yield name.removesuffix(".")
        nodes.extend(ast.iter_child_nodes(node))


@pytest.fixture(scope="module")
def imports() -> Imports:
    return found_imports()


def found_imports(types: bool = False) -> Imports:
    """Return each module's imports: modules of the project, and other libraries by their top name."""
    present = modules()

    def target(name: str) -> str:
        top = name.partition(".")[0]
        return (name if name in present else name.rpartition(".")[0]) if top in OWN else top

    names = {module: imported_names(path.read_text(), types) for module, path in present.items()}
    return {module: {target(name) for name in mine} - {module} for module, mine in names.items()}


@cache
def layers(of: str = "layers") -> list[list[str]]:
    """Return the layers of one of the page's pictures, top to bottom: names of modules and packages."""
    page = (ROOT / "docs" / "project" / "architecture.md").read_text()
    (picture,) = re.findall(rf"<!-- {of} -->\n```text\n(.*?)```", page, re.DOTALL)
    lines = [line.split()[1:] for line in picture.splitlines() if re.match(r"[a-z]", line)]
    return [[name for name in line if name.isidentifier()] for line in lines]


def box(module: str) -> str:
    """Return the picture's name for a module of `runner`. It is empty for the package's module."""
    return [*module.split("."), ""][1]


def fault(module: str, imported: str) -> str | None:
    """Describe a wrong import. Boxes of the layer `parts` must not import each other."""
    drawn = layers()
    level = {name: height for height, layer in enumerate(drawn) for name in layer}
    home, own = HOMES.get(imported, ""), imported.startswith("runner")
    if not f"{module}.".startswith(home):
        return f"belongs to {home}"
    if module.partition(".")[0] == "exactdata":
        return "is above it" if imported.startswith(("runner", "launch")) else None
    if module.startswith("launch"):
        shared = not (own or imported.startswith("exactdata")) or imported.startswith(SHARED)
        return None if shared else "is not shared with launch"
    if imported.startswith("launch"):
        return "is chosen by the config, never imported"
    mine, other = box(module), box(imported)
    if not own or "" in (mine, other) or mine == other:
        return None
    if level[other] < level[mine]:
        return "is in a layer above it"
    return "is a part beside it" if level[other] == level[mine] == level["checkpoint"] else None


def test_every_module_is_in_the_picture_and_nothing_else() -> None:
    drawn = [name for layer in layers() for name in layer]
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {box(name) for name in modules() if name.startswith("runner.")}


def test_imports_go_down_and_libraries_stay_in_place(imports: Imports) -> None:
    edges = [(module, name) for module, names in imports.items() for name in names]
    wrong = [f"{module} imports {name}, which {why}" for module, name in edges if (why := fault(module, name))]
    assert not wrong, "\n".join(wrong)
    assert {name for names in imports.values() for name in names} >= {*HOMES, "runner.config.targets"}


def test_imports_have_no_cycle(imports: Imports) -> None:
    TopologicalSorter(imports).prepare()  # raises CycleError


@pytest.mark.parametrize("package", ["runner.training", "runner.checkpoint", "runner.cli", "exactdata"])
def test_rooms_are_in_their_picture_and_import_downwards(package: str) -> None:
    """Forbid a room to import the top, or a room next to or above it, even for types. So rooms have no cycle."""
    prefix = f"{package}."
    inside = {
        module.removeprefix(prefix): [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        for module, names in found_imports(types=True).items()
        if module.startswith(prefix)
    }
    picture = layers(f"rooms of {package.removeprefix('runner.')}")
    level = {name: height for height, layer in enumerate(picture) for name in layer}
    assert level.keys() == {name.partition(".")[0] for name in inside}
    above = {module for module in inside if level[module.partition(".")[0]] == 0}
    assert not [module for module in above if "." in module], "a folder is a room, and not of the top"
    edges = [(module.partition(".")[0], name.partition(".")[0]) for module in inside for name in inside[module]]
    crossing = {(room, other) for room, other in edges if room != other and level[room] > 0}
    assert crossing  # some imports between rooms are found
    assert not [f"{room} imports {other}" for room, other in crossing if level[other] <= level[room]]
    TopologicalSorter(inside).prepare()  # no two modules import each other for types


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        ("runner.rundir.paths", "def f():\n    from runner.cli import start", "is in a layer above it"),
        ("runner.data.text", "import runner.checkpoint.files.commit", "is a part beside it"),
        ("runner.cli.start.start", "import_module('launch.slurm')", "is chosen by the config, never imported"),
        (
            "runner.cli.start.start",
            "importlib.import_module(f'launch.{name}')",
            "is chosen by the config, never imported",
        ),
        ("launch.local", "from runner.config.schema import Config", "is not shared with launch"),
        ("runner.training.model.build", "__import__('omegaconf')", "belongs to runner.config."),
        ("launch.local", "import submitit", "belongs to launch.batch"),
        ("runner.cli.start.start", "from runner.training import attempt", None),
        ("runner.training.model.build", "import_module(name)", None),
        ("runner.data.text", "if TYPE_CHECKING:\n    from runner.cli import start", None),
        ("launch.batch", "import submitit\nimport torch\nfrom runner.system import files", None),
        ("exactdata.elastic", "from runner.errors import nearest", "is above it"),
        ("runner.data.text", "from exactdata.elastic import ElasticSampler", None),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, why: str | None) -> None:
    found = [fault(module, name) for name in imported_names(source)]
    assert [each for each in found if each] == [why] * bool(why)


def _fresh(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_that_need_no_torch_do_not_import_it(tmp_path: Path) -> None:
    """Check the imports of these modules as a whole, indirect ones included: no torch, numpy, hydra or omegaconf."""
    program = f"""
import importlib, sys
for name in {WITHOUT_TORCH!r}:
    importlib.import_module(name)
from runner.cli.look import status
status.main([sys.argv[1], "--json"])
print("heavy:", sorted({{"torch", "numpy", "hydra", "omegaconf", "submitit"}} & sys.modules.keys()))
"""
    assert _fresh(program, str(tmp_path)).endswith("heavy: []\n")


def test_inspect_imports_neither_torch_nor_hydra() -> None:
    heavy = "{'torch', 'hydra', 'omegaconf', 'submitit'}"
    assert _fresh(f"import sys, runner.cli.look.inspect; print({heavy} & sys.modules.keys())") == "set()\n"
