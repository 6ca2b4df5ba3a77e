"""Lists installed and missing packages for ``prerequisite.sh``, without changing anything.

Requires Python 3.10 or later. If pip is not installed, only some of the lines are printed. Each
line has the form ``key=value``:

* ``executable``, ``prefix``, ``version``: properties of the running Python.
* ``venv``: 1 in a virtual environment. ``installable``: 1 if pip may install into the environment.
* ``torch``: 1 if torch is installed.
* ``conflict``: an installed version that this project cannot use (one line per package).
* ``missing``: a requirement with its pinned version to install (one line per package).
* ``keep``: ``name==version`` of an installed package that must not change (one line per package).
* ``tool``: the pinned version of a build tool, if the installed version is too old.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

try:
    from pip._vendor.packaging.requirements import Requirement

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
except ModuleNotFoundError:  # Without pip, this script can neither install nor compare packages.
    HAS_PIP = False
else:
    HAS_PIP = True

ROOT = Path(__file__).resolve().parents[1]


def name_of(requirement: Requirement) -> str:
    """Returns the name of ``requirement`` in the normalized form, so that names can be compared."""
    return re.sub(r"[-_.]+", "-", requirement.name).lower()


def pins(path: Path) -> Iterator[Requirement]:
    """Yields the requirements in the file ``path`` that apply to this Python."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text and ((marker := Requirement(text).marker) is None or marker.evaluate()):
            yield Requirement(text)


def installed_version(name: str) -> str | None:
    """Returns the installed version of the distribution ``name``, or ``None`` if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment() -> Iterator[tuple[str, str]]:
    """Yields keys and values that describe this Python environment."""
    site = sysconfig.get_path("purelib")
    # Linux distributions create this file to prevent pip from changing their Python (PEP 668).
    managed = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()
    venv = sys.prefix != sys.base_prefix
    yield "executable", sys.executable
    yield "prefix", sys.prefix
    yield "version", "{}.{}".format(*sys.version_info[:2])
    yield "venv", str(int(venv))
    yield "installable", str(int(HAS_PIP and os.access(site, os.W_OK) and (venv or not managed)))
    yield "torch", str(int(installed_version("torch") is not None))


def packages(
    *, exact: bool, test: bool, benchmarks: bool = False, examples: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields a keyword and a requirement for each package that this project needs.

    The keywords are ``missing``, ``keep``, ``tool`` and ``conflict``.

    Args:
        exact: Whether every package must have its pinned version, as in an environment that this
            project creates. Otherwise, any supported version is kept.
        test: Whether to include the tools that run the tests and checks.
        benchmarks: Whether to include the libraries that benchmarks compare this project with.
        examples: Whether to include the libraries whose models the examples and the tests train.
    """
    with (ROOT / "pyproject.toml").open("rb") as file:
        project: dict[str, Any] = tomllib.load(file)
    accepted = {name_of(r): r for r in map(Requirement, project["project"]["dependencies"])}
    tools = {name_of(r): r for r in map(Requirement, project["build-system"]["requires"])}
    requirements = list(pins(ROOT / "requirements.txt"))
    if Path("/dev/nvidiactl").exists():
        requirements += pins(ROOT / "requirements-gpu.txt")
    if test:
        requirements += pins(ROOT / "requirements-test.txt")
    if benchmarks:
        requirements += pins(ROOT / "requirements-benchmarks.txt")
    if examples or test:
        requirements += pins(ROOT / "requirements-examples.txt")
    for pin in requirements:
        name = name_of(pin)
        installed = installed_version(name)
        bounds = pin if exact else accepted.get(name) or tools.get(name)
        plain = f"{pin.name}{pin.specifier}"
        if installed is None or (exact and not pin.specifier.contains(installed, prereleases=True)):
            yield "missing", plain
        elif bounds is None or bounds.specifier.contains(installed, prereleases=True):
            yield "keep", f"{name}=={installed}"
        elif name in tools:
            yield "tool", plain
        else:
            yield "conflict", f"{name} {installed} (needs {bounds.specifier})"


def main() -> None:
    """Prints the properties of this Python environment, and the state of its packages."""
    parser = argparse.ArgumentParser(description="Print what this environment has and lacks.")
    parser.add_argument("--exact", action="store_true", help="accept pinned versions only")
    parser.add_argument("--test", action="store_true", help="include the tools for tests")
    parser.add_argument(
        "--benchmarks", action="store_true", help="include libraries to compare with"
    )
    parser.add_argument("--examples", action="store_true", help="include models for examples")
    arguments = parser.parse_args()
    for key, value in environment():
        print(f"{key}={value}")
    if not HAS_PIP:
        return
    for key, value in packages(
        exact=arguments.exact,
        test=arguments.test,
        benchmarks=arguments.benchmarks,
        examples=arguments.examples,
    ):
        print(f"{key}={value}")


if __name__ == "__main__":
    main()
