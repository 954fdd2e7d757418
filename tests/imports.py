"""Print which packages of the product import which, from the top of the order in ARCHITECTURE.md to its bottom.

    python tests/imports.py

`^` marks a package that is not below the importer: there should be none, and the exit status says whether there is one.
Parentheses mark a package of which only types are named: nothing is imported from it when the program runs.  The top
level, `zmdp`, is left out: all packages are in it, and it imports the public names when they are first used.
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOP = [init.parent.name for init in ROOT.glob("*/__init__.py")]


def sources():
    """Return every module of the product and its file; PyInstaller's hooks, which run in it, are no part of it."""
    found = {}
    for path in sorted(
        [*(ROOT / "src" / "zmdp").rglob("*.py"), *(p for top in TOP for p in (ROOT / top).rglob("*.py"))]
    ):
        if "__pyinstaller" in path.parts:
            continue
        inside = path.relative_to(ROOT / "src" if "src" in path.relative_to(ROOT).parts else ROOT).with_suffix("")
        parts = [part for part in inside.parts if part not in {"zmdp", "__init__"}]
        found[".".join(["zmdp", *parts])] = path
    return found


SOURCES = sources()
PACKAGES = {name for name, path in SOURCES.items() if path.name == "__init__.py"}


def imports(name):
    """Return the modules of the product that `name` imports, and when: as it is `loaded`, `later`, or for `types`."""
    found = []

    def visit(node, when):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom | ast.Import):
                found.extend((target, when) for target in targets(name, child))
            elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                visit(child, "types")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                visit(child, "later")
            else:
                visit(child, when)

    visit(ast.parse(SOURCES[name].read_text()), "loaded")
    return found


def targets(name, statement):
    """Return the modules that an import statement in the module `name` names."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names if alias.name in SOURCES]
    base = statement.module or ""
    if statement.level:
        package = name.split(".") if name in PACKAGES else name.split(".")[:-1]
        package = package[: len(package) - statement.level + 1]
        base = ".".join([*package, *([base] if base else [])])
    if base not in SOURCES:
        return []
    inner = [f"{base}.{alias.name}" for alias in statement.names]
    return [each if each in SOURCES else base for each in inner]


def package_of(name):
    """Return the package that contains the module, or the module itself if it has its own place; without `zmdp.`."""
    package = name if name in PACKAGES or name in MODULES else name.rpartition(".")[0]
    return package.removeprefix("zmdp.")


def order():
    """Return the lines of the order in ARCHITECTURE.md from the top, each with its packages."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    block = text.partition("<!-- The order of the packages: tests/imports.py reads it. -->")[2].split("```")[1]
    return [[name.replace("/", ".") for name in line.split()] for line in block.splitlines()[1:]]


MODULES = {f"zmdp.{name}" for row in order() for name in row} - PACKAGES
"""The modules that have a place of their own in the order."""


def graph():
    """Return for each package the packages that it imports, and for each of these the times at which it does."""
    found = {}
    for name in SOURCES:
        of = found.setdefault(package_of(name), defaultdict(set))
        for target, when in imports(name):
            if package_of(target) != package_of(name):
                of[package_of(target)].add(when)
    return found


def below():
    """Return for each package those from which the order lets it import."""
    found, lower = {}, set()
    for row in reversed(order()):
        found |= dict.fromkeys(row, lower)
        lower = lower | set(row)
    return found


def main():
    """Print the graph, and return 1 if an import runs up, else 0."""
    arrows, allowed, up = graph(), below(), 0
    for row in order():
        for package in row:
            shown = []
            for target, when in sorted(arrows[package].items()):
                name = target.replace(".", "/")
                if when == {"types"}:
                    shown.append(f"({name})")
                elif target in allowed[package]:
                    shown.append(name)
                elif target != "zmdp":
                    shown.append(f"^{name}")
                    up = 1
            print(f"{package.replace('.', '/'):<24}{' '.join(shown)}".rstrip())
        print()
    return up


if __name__ == "__main__":
    sys.exit(main())
