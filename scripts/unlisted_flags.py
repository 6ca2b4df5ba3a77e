"""Prints the flags of a Megatron-LM tree that the trainer neither accepts, ignores nor rejects.

    python scripts/unlisted_flags.py TREE

The tree is a checkout of Megatron-LM. Its sources are parsed, not imported. Megatron-LM defines
flags by calls of ``add_argument``, and by dataclasses whose fields become flags. Each flag is
printed with the file that defines it and its help text. New flags of a release must be added to
``megatron/adaptive/config/unsupported_flags.py``.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.megatron_core_flags import OTHERS, CoreConfig
from megatron.adaptive.config.unsupported_flags import NEWER, is_idle, reason_for, with_no

FILES = (
    "megatron/training/*argument*.py",
    "megatron/training/config/*.py",
    "megatron/core/**/*config*.py",
)


def texts(node: ast.expr | None) -> list[str]:
    """Returns the strings in ``node`` if it is a list or a tuple, else an empty list."""
    if not isinstance(node, ast.List | ast.Tuple):
        return []
    return [str(item.value) for item in node.elts if isinstance(item, ast.Constant)]


def flags_of_calls(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields the name and help text of each flag that a call of ``add_argument`` defines."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr != "add_argument":
            continue
        parts = [keyword.value for keyword in node.keywords if keyword.arg == "help"]
        text = next((str(part.value) for part in parts if isinstance(part, ast.Constant)), "")
        has_opposite = any("BooleanOptionalAction" in ast.unparse(k.value) for k in node.keywords)
        for argument in node.args:
            if isinstance(argument, ast.Constant) and str(argument.value).startswith("--"):
                name = str(argument.value)
                yield name, text
                if has_opposite:
                    yield f"--no-{name.removeprefix('--')}", text


def groups_of(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Yields each dataclass whose fields become flags, with the names of excluded fields."""
    lists: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            lists[node.targets[0].id] = texts(node.value)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id != "ArgumentGroupFactory" or not isinstance(node.args[0], ast.Name):
            continue
        excluded: list[str] = []
        for keyword in node.keywords:
            if keyword.arg == "exclude" and isinstance(keyword.value, ast.Name):
                excluded = lists[keyword.value.id]
            elif keyword.arg == "exclude":
                excluded = texts(keyword.value)
        yield node.args[0].id, set(excluded)


def flags_of_class(node: ast.ClassDef, excluded: set[str]) -> Iterator[tuple[str, str]]:
    """Yields the name and the help text of each flag that the dataclass ``node`` defines."""
    for item, after in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        name = item.target.id
        if name in excluded or name.startswith("_") or "Callable" in ast.unparse(item.annotation):
            continue
        if item.value is not None and "init=False" in ast.unparse(item.value):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = str(after.value.value)
        names: list[str] = []
        for part in ast.walk(item.value or ast.Pass()):
            if isinstance(part, ast.Dict):
                for key, value in zip(part.keys, part.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "arg_names":
                        names = texts(value)
        is_on = isinstance(item.value, ast.Constant) and item.value.value is True
        spelling = name.replace("_", "-")
        default = [f"--no-{spelling}", f"--disable-{spelling}"] if is_on else [f"--{spelling}"]
        for flag in names or default:
            yield flag, text


def flags_of_tree(root: Path) -> dict[str, tuple[str, str]]:
    """Returns all flags of the Megatron-LM tree ``root``, each with its file and its help text."""
    flags: dict[str, tuple[str, str]] = {}
    groups: dict[str, set[str]] = {}
    classes: dict[str, tuple[str, ast.ClassDef]] = {}
    for path in sorted({path for pattern in FILES for path in root.glob(pattern)}):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file = str(path.relative_to(root))
        groups.update(groups_of(tree))
        classes.update((n.name, (file, n)) for n in tree.body if isinstance(n, ast.ClassDef))
        for name, text in flags_of_calls(tree):
            flags.setdefault(name, (file, text))
    missing = {name for name in groups if name not in classes}
    for path in sorted(root.glob("megatron/**/*.py")) if missing else ():
        text = path.read_text(encoding="utf-8")
        if any(f"class {name}" in text for name in missing):
            nodes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
            file = str(path.relative_to(root))
            classes.update((n.name, (file, n)) for n in nodes if n.name in missing)
    if unknown := sorted(missing - classes.keys()):
        raise SystemExit(
            f"error: {root} must be a complete checkout of Megatron-LM, but no file below "
            f"megatron defines {', '.join(unknown)}"
        )
    for group, excluded in groups.items():
        waiting = [group]
        while waiting:  # A dataclass also has the fields of its base classes.
            file, node = classes.get(waiting.pop(), ("", None))
            if node is None:
                continue
            waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
            for name, text in flags_of_class(node, excluded):
                flags.setdefault(name, (file, text))
    return flags


def main() -> int:
    """Prints the flags that the trainer does not know. Returns 1 if there are any, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, help="checkout of Megatron-LM")
    options = parser.parse_args()
    kinds = (*OTHERS, CoreConfig)
    taken = {name for kind in kinds for spec in fields_of(kind) for name in spec.names}
    taken.update(NEWER)
    flags = flags_of_tree(options.tree)
    unlisted = [
        name
        for name in sorted(flags)
        if taken.isdisjoint((name, with_no(name)))
        and not is_idle(name)
        and reason_for(name) is None
    ]
    for name in unlisted:
        file, text = flags[name]
        print(f"{name}  ({file})  {' '.join(text.split())[:160]}")
    print(f"{len(unlisted)} of {len(flags)} flags are not listed", file=sys.stderr)
    return int(bool(unlisted))


if __name__ == "__main__":
    sys.exit(main())
