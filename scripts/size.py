#!/usr/bin/env python3
"""Prints the size of the project, and fails if it exceeds the budgets in pyproject.toml.

Counts the lines of the files that git tracks, per folder of the package. If git is not available,
all files are counted. The script also lists small files that only one other file imports, import
cycles, public classes with the same name, and files that are too long. Imports inside functions are
included. Imports that are only for type checking are ignored when searching for cycles. The budgets
are in ``[tool.size]``.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "megatron/adaptive"
CODE = (".py", ".js")
SMALL_FILE_LINES = 170
LONG_FILE_LINES = 800
LONG_FUNCTION_LINES = 60
MANY_IMPORTS = 25


@dataclass
class Module:
    """Name, size, imports and public classes of a Python file of the package."""

    name: str
    path: str
    lines: int
    imports: set[str] = field(default_factory=set)
    imports_at_run_time: set[str] = field(default_factory=set)
    classes: list[str] = field(default_factory=list)


def tracked_files() -> list[str]:
    """Returns the paths of the project's files, relative to its root, except ignored files."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    if not names:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
        names = [name for name in names if not name.startswith((".git/", ".venv/", "build/"))]
    return sorted(name for name in set(names) if (ROOT / name).is_file())


def count_lines(path: str) -> int:
    """Returns the number of newlines in the file ``path``, or 0 for a binary file."""
    content = (ROOT / path).read_bytes()
    return 0 if b"\0" in content else content.count(b"\n")


def module_name(path: str) -> str:
    """Returns the dotted module name of the Python file ``path``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported_names(node: ast.AST, module: Module) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = module.name.split(".")
            if not module.path.endswith("__init__.py"):
                parts = parts[:-1]
            parts = parts[: len(parts) - (node.level - 1)]
            base = ".".join(parts + ([node.module] if node.module else []))
        return [f"{base}.{alias.name}" for alias in node.names] + [base]
    return []


def _is_type_checking(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _collect(node: ast.AST, module: Module, at_run_time: bool) -> None:
    for child in ast.iter_child_nodes(node):
        names = _imported_names(child, module)
        module.imports.update(names)
        if at_run_time:
            module.imports_at_run_time.update(names)
        _collect(child, module, at_run_time and not _is_type_checking(child))


def read_modules(paths: list[str]) -> dict[str, Module]:
    """Parses the package's files in ``paths``, and returns them by module name."""
    modules: dict[str, Module] = {}
    for path in paths:
        if not (path.startswith(PACKAGE + "/") and path.endswith(".py")):
            continue
        module = Module(module_name(path), path, count_lines(path))
        tree = ast.parse((ROOT / path).read_text())
        _collect(tree, module, True)
        module.classes = [
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        ]
        modules[module.name] = module
    for module in modules.values():
        module.imports = _targets(module.imports, modules) - {module.name}
        module.imports_at_run_time = _targets(module.imports_at_run_time, modules) - {module.name}
    return modules


def _targets(names: set[str], modules: dict[str, Module]) -> set[str]:
    # The statement ``from a.b import c`` may import the module a.b.c or a name from a.b. If a.b.c
    # is a module, a.b is not counted as imported.
    imported = {name for name in names if name in modules}
    return {
        name
        for name in imported
        if not (
            modules[name].path.endswith("__init__.py")
            and any(other.startswith(name + ".") for other in imported)
        )
    }


def find_circles(modules: dict[str, Module]) -> list[list[str]]:
    """Returns a list that contains one cycle of imports in ``modules``, or an empty list."""
    imports = {name: module.imports_at_run_time for name, module in modules.items()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return [error.args[1]]
    return []


def find_single_importer_files(modules: dict[str, Module]) -> list[tuple[str, int, str]]:
    """Returns the path, number of lines and importer of each small file with a single importer."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for name in module.imports:
            importers[name].add(module.name)
    functions = []
    for name, module in modules.items():
        if module.lines >= SMALL_FILE_LINES or module.path.endswith(("__init__.py", "__main__.py")):
            continue
        if len(importers[name]) == 1:
            functions.append((module.path, module.lines, next(iter(importers[name]))))
    return sorted(functions)


def find_shared_class_names(modules: dict[str, Module]) -> dict[str, list[str]]:
    """Returns the names of public classes that several files define, with the files' paths."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        for name in module.classes:
            places[name].append(module.path)
    return {name: sorted(paths) for name, paths in sorted(places.items()) if len(paths) > 1}


def find_long_functions(paths: list[str]) -> list[tuple[str, int]]:
    """Returns the names and line counts of functions that are too long. Docstrings do not count."""
    long = []
    for path in paths:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    docstring = node.body[0]
                    lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
                if lines > LONG_FUNCTION_LINES:
                    long.append((f"{path}:{node.name}", lines))
    return long


def find_many_imports(paths: list[str], allowed: dict[str, str]) -> list[tuple[str, int]]:
    """Returns the paths of files with too many import statements, and the number of statements.

    Args:
        paths: Paths of Python files.
        allowed: Paths of files that may have any number of import statements, each with the reason.
    """
    many = []
    for path in paths:
        nodes = ast.walk(ast.parse((ROOT / path).read_text()))
        count = sum(isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes)
        if count > MANY_IMPORTS and path not in allowed:
            many.append((path, count))
    return many


def measure(many_imports_allowed: dict[str, str]) -> dict[str, object]:
    """Measures lines, files, imports and classes of the project. Returns the results by name.

    Args:
        many_imports_allowed: Paths of files that may have many import statements, each with the
            reason.
    """
    paths = tracked_files()
    lines = {path: count_lines(path) for path in paths}
    modules = read_modules(paths)
    package = [path for path in paths if path.startswith(PACKAGE + "/")]
    code = [path for path in package if path.endswith(CODE)]
    python = [path for path in code if path.endswith(".py")]
    folders: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in code:
        folder = path.removeprefix(PACKAGE + "/").split("/")
        name = folder[0] if len(folder) > 1 else "."
        folders[name] += lines[path]
        files[name] += 1
    tops: Counter[str] = Counter()
    for path in paths:
        tops[path.split("/")[0] if "/" in path else "."] += lines[path]
    return {
        "package_lines": sum(lines[path] for path in package),
        "package_files": len(package),
        "repository_lines": sum(lines.values()),
        "single_importer_files": find_single_importer_files(modules),
        "import_circles": find_circles(modules),
        "shared_class_names": find_shared_class_names(modules),
        "long_files": [
            (path, lines[path])
            for path in paths
            if path.endswith((".py", ".js", ".cc", ".h", ".sh")) and lines[path] > LONG_FILE_LINES
        ],
        "long_functions": find_long_functions(python),
        "files_with_many_imports": find_many_imports(python, many_imports_allowed),
        "folders": {name: (folders[name], files[name]) for name in sorted(folders)},
        "top_folders": dict(sorted(tops.items())),
    }


def check(figures: dict[str, object], budgets: dict[str, int]) -> list[str]:
    """Returns a message for each of the ``budgets`` that is exceeded or has an unknown name."""
    wrong = []
    for name, budget in budgets.items():
        if name not in figures:
            wrong.append(
                f"[tool.size] {name} is not a known figure; use one of {', '.join(figures)}"
            )
            continue
        figure = figures[name]
        size = figure if isinstance(figure, int) else len(figure)  # type: ignore[arg-type]
        if size > budget:
            wrong.append(f"{name} is {size:,}, but must be at most {budget:,}; remove something")
    return wrong


def main() -> int:
    """Prints the sizes. Returns 1 if a budget is exceeded, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--all", action="store_true", help="also list the files behind each figure")
    options = parser.parse_args()
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["size"]
    figures = measure(budgets.pop("many_imports_allowed"))
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, (size, count) in figures["folders"].items():  # type: ignore[attr-defined]
            print(f"{PACKAGE}/{name:<14} {size:7,} lines {count:4} files")
        for name, size in figures["top_folders"].items():  # type: ignore[attr-defined]
            print(f"{name + ('/' if name != '.' else ''):<31} {size:7,} lines")
        for name, figure in figures.items():
            if name in ("folders", "top_folders"):
                continue
            size = figure if isinstance(figure, int) else len(figure)  # type: ignore[arg-type]
            limit = f" of {budgets[name]:,}" if name in budgets else ""
            print(f"{name.replace('_', ' '):<31} {size:7,}{limit}")
            if options.all and not isinstance(figure, int):
                items = figure.items() if isinstance(figure, dict) else figure
                for item in items:  # type: ignore[attr-defined]
                    print("    ", *(item if isinstance(item, (tuple, list)) else (item,)))
    wrong = check(figures, budgets)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
