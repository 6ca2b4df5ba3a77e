#!/usr/bin/env python3
"""Lists unclear words in the project's texts, and fails if there are too many.

Checks docstrings, glosses (the lines below ``Args:`` and ``Attributes:``), comments and names
against the rules of CONTRIBUTING.md, as far as a program can check them::

    python scripts/words.py            # counts by rule, and status 1 if a count is above its limit
    python scripts/words.py PATH ...   # each place in these files or folders

Without PATH, it checks the files and folders that pyproject.toml lists. The limits are also in
pyproject.toml ([tool.words]).
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent

NAMELESS = "of that what where as likewise by from in at who whose whom which how with to on and"
"""Words with which the description of a variable or parameter must not start."""
EMPTY_NAMES = frozenset(
    "one found place given at words own what whom ours theirs mine known wanted told heed".split()
)
"""Names of variables and parameters that do not say what they contain."""
DIALECT = re.compile(
    r"\b(likewise|as given|so (?:many|much) (?:as|of)|of whom|heed(?:s|ed)?|anew|shall|told|tells?"
    r"|what it|what is there|goes on|who it is|and nothing else|it is that)\b",
    re.IGNORECASE,
)
"""Phrases that readers did not understand at the first reading."""
GLOSS = re.compile(
    r"^(?P<indent>\s+)(?P<name>\*{0,2}[\w\[\], *]+?)(?: \([^)]*\))?: (?P<text>\S.*)$"
)
SECTIONS = ("Args:", "Attributes:")
HEADING = re.compile(r"^\s*[A-Z]\w+:$")


@dataclass(frozen=True)
class Stumble:
    """Place in a text that breaks a rule.

    Attributes:
        rule: Name of the rule, as in pyproject.toml.
        path: Path of the file.
        line: Line number, counted from 1.
        text: Words that break the rule.
    """

    rule: str
    path: Path
    line: int
    text: str


def _begins_nameless(text: str) -> bool:
    first = re.match(r"[A-Za-z]+", text)
    return first is not None and first[0].lower() in NAMELESS.split()


def _docstring_stumbles(path: Path, node: ast.Constant, *, is_attribute: bool) -> Iterator[Stumble]:
    lines = str(node.value).splitlines()
    if is_attribute and lines and _begins_nameless(lines[0].strip()):
        yield Stumble("nameless_comments", path, node.lineno, lines[0].strip())
    indent: int | None = None
    is_in_section = False
    for number, line in enumerate(lines):
        line_number = node.lineno + number
        if match := DIALECT.search(line):
            yield Stumble("dialect", path, line_number, f"{match[0]}: {line.strip()}")
        if HEADING.match(line):
            is_in_section = line.strip() in SECTIONS
            indent = None
            continue
        gloss = GLOSS.match(line)
        if not is_in_section or gloss is None:
            continue
        indent = len(gloss["indent"]) if indent is None else indent
        if len(gloss["indent"]) == indent and _begins_nameless(gloss["text"]):
            yield Stumble("nameless_glosses", path, line_number, line.strip())


def _docstrings(tree: ast.Module) -> Iterator[tuple[ast.Constant, bool]]:
    """Yields each docstring in ``tree``, and whether it describes the variable above it."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for index, child in enumerate(body):
            if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                continue
            if isinstance(child.value.value, str):
                follows = index > 0 and isinstance(body[index - 1], (ast.Assign, ast.AnnAssign))
                yield child.value, follows


def _comment_stumbles(path: Path, text: str) -> Iterator[Stumble]:
    """Yields problems in comments. First words are checked only in the first line of each block."""
    last_line = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        comment = token.string.lstrip("# ")
        line = token.start[0]
        is_first = line != last_line + 1
        is_alone = not token.line[: token.start[1]].strip()
        last_line = line if is_alone else -1
        if is_first and _begins_nameless(comment):
            yield Stumble("nameless_comments", path, line, comment)
        if match := DIALECT.search(comment):
            yield Stumble("dialect", path, line, f"{match[0]}: {comment}")


def _name_stumbles(path: Path, tree: ast.Module) -> Iterator[Stumble]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg in EMPTY_NAMES:
            yield Stumble("empty_names", path, node.lineno, node.arg)
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and node.id in EMPTY_NAMES
        ):
            yield Stumble("empty_names", path, node.lineno, node.id)


def stumbles(path: Path) -> list[Stumble]:
    """Returns all problems in the Python file ``path``, sorted by line number."""
    text = path.read_text()
    tree = ast.parse(text)
    listed = list(_name_stumbles(path, tree))
    for constant, is_attribute in _docstrings(tree):
        listed += _docstring_stumbles(path, constant, is_attribute=is_attribute)
    listed += _comment_stumbles(path, text)
    return sorted(listed, key=lambda stumble: (stumble.line, stumble.rule))


def main() -> int:
    """Prints the number of problems, or each problem. Returns 1 if a limit is exceeded, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="list the places in these paths only")
    options = parser.parse_args()
    for path in options.paths:
        if not path.is_dir() and path.suffix != ".py":
            parser.error(f"{path} is neither a Python file nor a folder; pass one of these")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["words"]
    roots = options.paths or [ROOT / path for path in settings["paths"]]
    files = [file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))]
    listed = [stumble for file in sorted(files) for stumble in stumbles(file)]
    counts = Counter(stumble.rule for stumble in listed)
    limits = settings["limits"]
    too_many = [rule for rule, limit in limits.items() if counts[rule] > limit]
    for stumble in listed:
        if options.paths or stumble.rule in too_many:
            print(f"{stumble.path}:{stumble.line}: {stumble.rule}: {stumble.text}")
    for rule, limit in limits.items():
        print(f"{rule.replace('_', ' '):<31} {counts[rule]:7,} of {limit:,}")
    for rule in too_many:
        print(f"error: {rule} is above its limit; reword the listed places", file=sys.stderr)
    return 1 if too_many else 0


if __name__ == "__main__":
    sys.exit(main())
