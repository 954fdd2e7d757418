"""The product uses what other libraries promise: none of their private names.

A private name that the product defines itself is taken for its own wherever it is used.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("mdp", "mmi", "clients", "workers", "titanic", "spark", "migrations", "src")
KNOWN = {
    # PySpark has no public way to its JVM, to the session there, or to the trace of an error there.
    "spark": {
        "_active_session", "_active_spark_context", "_explain_string", "_gateway", "_instantiatedSession", "_jdf",
        "_jsc", "_jsparkSession", "_jvm", "_origin", "_stackTrace",
    },
}  # fmt: skip
"""Private names of other libraries that are used, by folder: why must be said."""
PUBLIC = {"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"}
"""Names with an underscore that are documented: of named tuples, `os` and `sys`."""


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and name.isidentifier() and not name.endswith("__")


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module defines: its own, and attributes of its classes and of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def used(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module takes from objects and imports, each with what it is taken from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield f"{ast.unparse(node.value)}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{each.name}" for each in node.names if is_private(each.name))
            yield from (f"{node.module}." for part in (node.module or "").split(".") if is_private(part))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "setattr", "hasattr", "delattr"}:
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value):
                yield f"{ast.unparse(node.args[0])}.{name.value}"


def test_no_private_name_of_another_library_is_used() -> None:
    trees = list(sources())
    own = {name for _, tree in trees for name in defined(tree) if is_private(name)}
    found = [
        f"{path}: {use}"
        for path, tree in trees
        for use in used(tree)
        if (name := use.rpartition(".")[2]) not in own | PUBLIC and name not in KNOWN.get(path.parts[0], ())
    ]
    assert not found, "\n".join(found)
