"""Finds the copies of megatron-core on Python's path without importing them.

Python imports the first copy on its path. A Megatron-LM checkout on ``PYTHONPATH`` takes precedence
over an installed megatron-core, although pip lists the version of the installed copy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import megatron

_NUMBERS = re.compile(r"^(?:MAJOR|MINOR|PATCH|PRE_RELEASE) *= *['\"]?([\w.]*)['\"]?", re.MULTILINE)


@dataclass(frozen=True)
class CoreCopy:
    """A copy of megatron-core on Python's path.

    Attributes:
        version: Version from the file ``package_info.py`` of the copy, such as ``0.19.2``.
        folder: Folder of the package ``megatron.core``.
    """

    version: str
    folder: Path


def core_copies() -> list[CoreCopy]:
    """Returns the copies of megatron-core in the order of Python's path, without duplicates."""
    copies: dict[Path, CoreCopy] = {}
    for part in megatron.__path__:
        folder = Path(part, "core")
        try:
            numbers = _NUMBERS.findall((folder / "package_info.py").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        version = ".".join(numbers[:3]) + "".join(numbers[3:])
        copies.setdefault(folder.resolve(), CoreCopy(version, folder))
    return list(copies.values())


def core_version() -> str | None:
    """Returns the version of megatron-core that Python imports, or ``None`` if it is missing."""
    if copies := core_copies():
        return copies[0].version
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None


def shadowed_copies() -> str | None:
    """Returns a warning about copies of megatron-core that the imported copy hides.

    Only copies whose versions differ from the imported copy are mentioned. The result is ``None``
    if there are no such copies.
    """
    copies = core_copies()
    others = [copy for copy in copies[1:] if copy.version != copies[0].version]
    if not others:
        return None
    listed = ", ".join(f"{copy.version} in {copy.folder}" for copy in others)
    return (
        f"several copies of megatron-core are on Python's path; {copies[0].version} in "
        f"{copies[0].folder} is used, not {listed}"
    )
