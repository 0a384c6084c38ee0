"""Find the small changes that can be made to a module in its syntax tree, and draw them in a random order.

A change's identity depends on its file, the text of its line and the edit. Code that moves keeps its changes, their
order and their judgements. Docstrings, type hints, messages, logging and assertions are left alone.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES = """
    runner/rundir/lease.py runner/rundir/attempt_log.py runner/rundir/custody.py runner/rundir/appender.py
    runner/checkpoint/files/directory.py runner/checkpoint/files/commit.py runner/checkpoint/files/manifest.py
    runner/checkpoint/files/choice.py runner/checkpoint/manager.py runner/checkpoint/saver.py
    runner/checkpoint/tensors/reader.py runner/checkpoint/tensors/restore.py
    runner/checkpoint/files/pins.py runner/checkpoint/tensors/state.py runner/checkpoint/cadence.py
    exactdata/order/*.py exactdata/sampler.py exactdata/elastic.py exactdata/trainer_loader.py
    exactdata/loading/loader.py exactdata/loading/loader_state.py exactdata/loading/index_stream.py
    exactdata/loading/redistribution.py
    runner/training/records/recorder.py runner/training/data/consumption.py runner/training/session.py
    runner/training/attempt.py runner/training/step/step.py
    runner/metrics/jsonl.py runner/system/files.py
    launch/requeue.py launch/job.py launch/slurm.py launch/scheduler.py
    runner/cli/start/start.py runner/cli/start/plan.py
""".split()
"""The modules behind the promises: a kill loses nothing, no other process interferes, the data order, the requeue."""

SPOKEN = "debug info warning error exception warn say print _print".split()
TURNED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
TURNED |= {"in": "not in", "not in": "in"}
OFF_BY_ONE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
OPERATORS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
OPERATORS |= {ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}


@dataclass(frozen=True)
class Change:
    """Replace the bytes `start` to `end` of a file.

    Attributes:
        name: the identity, eight hexadecimal digits.
        file: relative to the project.
        lines: first and last changed line, from 1.
        at_import: whether an import of the module executes the line, and not a test.
    """

    name: str
    file: str
    lines: tuple[int, int]
    kind: str
    start: int
    end: int
    old: str
    new: str
    at_import: bool

    def __str__(self) -> str:
        old = " ".join(self.old.split())
        old = old if len(old) < 60 else f"{old[:57]}..."
        new = "negated" if self.kind == "condition" else self.new
        return f"{self.file}:{self.lines[0]} {self.kind}: {old} -> {new}"

    def applied(self, source: bytes) -> bytes:
        """Return the changed content of the file."""
        return source[: self.start] + self.new.encode() + source[self.end :]


class _Finder(ast.NodeVisitor):
    """Collect (kind, start, end, new, node, whether it is in a function)."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.found: list[tuple[str, int, int, str, ast.AST, bool]] = []
        self._depth = 0
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: Any) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def replace(self, kind: str, node: ast.AST, new: str) -> None:
        self.found.append((kind, *self.span(node), new, node, self._depth > 0))

    def operator(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Replace an operator. It is between its operands, among brackets and comments."""
        gap = self.span(left)[1]
        pattern = r"\s+".join(map(re.escape, old.split()))
        if old[0].isalpha():
            pattern = rf"\b{pattern}\b"
        match = re.search(pattern.encode(), self.source[gap : self.span(right)[0]])
        if match:
            self.found.append((kind, gap + match.start(), gap + match.end(), new, right, self._depth > 0))

    def condition(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.replace("condition", test, f"({self.text(test.operand)})")
        elif self.text(test) not in ("True", "TYPE_CHECKING") and len(getattr(test, "ops", ())) != 1:
            self.replace("condition", test, f"(not ({self.text(test)}))")

    def visit(self, node: ast.AST) -> None:
        if _is_left_alone(node):
            return
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            self.condition(node.test)
        for test in getattr(node, "ifs", ()):
            self.condition(test)
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        if node.name not in ("__repr__", "__str__"):
            self._depth += 1
            for statement in node.body:
                self.visit(statement)
            self._depth -= 1

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, kind, right in zip(operands, node.ops, operands[1:], strict=False):
            old = OPERATORS[type(kind)]
            self.operator("comparison", left, right, old, TURNED[old])
            if old in OFF_BY_ONE:
                self.operator("off by one", left, right, old, OFF_BY_ONE[old])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.operator("and/or", left, right, old, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, (ast.Add, ast.Sub)):
            old, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            self.operator("plus/minus", node.left, node.right, old, new)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace("truth", node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self.replace("number", node, repr(node.value + 1))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not _is_left_alone(node.value):
            self.replace("call", node, "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            self.replace("min/max", node.func, "max" if node.func.id == "min" else "min")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(getattr(node.value, "value", 0), bool | None):
            self.replace("return", node.value, "None")
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.replace("except", node.type, "()")
        for statement in node.body:
            self.visit(statement)


def _is_left_alone(node: ast.AST) -> bool:
    """Return whether a node is a message, an assertion or a logging call."""
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", "")) in SPOKEN
    return isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert))


def changes_of(root: Path, file: str) -> list[Change]:
    """Return every change of one module, in the order of its lines."""
    source = (root / file).read_bytes()
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    lines, seen, changes = source.decode().splitlines(), Counter[tuple[str, ...]](), []
    for kind, start, end, new, node, inside in sorted(finder.found, key=lambda each: each[:4]):
        first = source.count(b"\n", 0, start) + 1
        old = source[start:end].decode()
        identity = (file, kind, lines[first - 1].strip(), old, new)
        seen[identity] += 1
        name = hashlib.sha256(repr((*identity, seen[identity])).encode()).hexdigest()[:8]
        last = max(first, getattr(node, "end_lineno", first))
        changes.append(Change(name, file, (first, last), kind, start, end, old, new, not inside))
    return changes


def modules(root: Path) -> list[str]:
    """Return the files to change."""
    return sorted({path.relative_to(root).as_posix() for pattern in MODULES for path in root.glob(pattern)})


def drawn(root: Path, seed: int) -> Iterator[Change]:
    """Yield all changes in an order that depends on the seed. An edit of the code does not move the others."""
    every = [change for file in modules(root) for change in changes_of(root, file)]
    yield from sorted(every, key=lambda change: hashlib.sha256(f"{seed} {change.name}".encode()).digest())
