"""Downloads wheels for a machine without a network. Used by ``scripts/gpu_pack.sh``.

    python scripts/pack_wheels.py FOLDER [INSTALLED]

INSTALLED is a file with the output of ``pip freeze`` on that machine (``name==version`` lines). The
wheels are for the Python that runs this script.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

from pip._vendor.packaging.requirements import InvalidRequirement, Requirement

if str(Path(__file__).resolve().parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from environment import ROOT, name_of, pins

ASSUMED_MISSING = ("megatron-core", "plotly", "openpyxl", "et-xmlfile", "nvidia-ml-py")
"""Packages that are usually missing in container images for machine learning."""


def installed_names(path: Path) -> set[str]:
    """Returns the names of the packages in ``path``, a file with the output of ``pip freeze``.

    Raises:
        SystemExit: A line does not contain the name of a package.
    """
    names = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if not text or text.startswith("-"):
            continue
        try:
            names.add(name_of(Requirement(text)))
        except InvalidRequirement as error:
            # The first line is enough. Newer releases of pip add a line that marks the position of
            # the error.
            reason = str(error).splitlines()[0]
            message = f"{path}: {text!r} is not a line of pip freeze: {reason}"
            raise SystemExit(f"error: {message}") from None
    return names


def needs(wheel: Path) -> list[Requirement]:
    """Returns the non-optional requirements of ``wheel`` for this Python."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode("utf-8"))
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
    return [pin for pin in required if pin.marker is None or pin.marker.evaluate({"extra": ""})]


def download(requirement: str, folder: Path) -> Path:
    """Downloads a wheel for ``requirement`` to ``folder``, and returns its path.

    Raises:
        SystemExit: pip has failed, and has printed the reason.
    """
    before = set(folder.iterdir())
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    if subprocess.run([*command, "-d", str(folder), requirement], check=False).returncode:
        raise SystemExit(f"error: pip found no wheel of {requirement} for this Python")
    (wheel,) = set(folder.iterdir()) - before
    return wheel


def fetch(folder: Path, is_missing: Iterable[str] | None, present: set[str]) -> None:
    """Downloads all missing requirements and their dependencies to ``folder``.

    Args:
        folder: Folder for the wheels.
        is_missing: Names of the missing packages. ``None`` means all packages that are not in
            ``present``.
        present: Names of the packages that are installed on the machine. The function adds the
            downloaded packages.
    """
    names = None if is_missing is None else set(is_missing)
    waiting = [*pins(ROOT / "requirements.txt"), *pins(ROOT / "requirements-gpu.txt")]
    # The GPU check needs only pytest from this file.
    waiting += [pin for pin in pins(ROOT / "requirements-test.txt") if pin.name == "pytest"]
    while waiting:
        requirement = waiting.pop()
        name = name_of(requirement)
        if name in present or (names is not None and name not in names):
            continue
        present.add(name)
        waiting += needs(download(f"{requirement.name}{requirement.specifier}", folder))


def main() -> None:
    """Downloads the wheels to the folder given on the command line, and prints their sizes."""
    folder, *rest = map(Path, sys.argv[1:])
    if rest:
        present = installed_names(rest[0])
        if "torch" not in present:
            raise SystemExit(
                f"error: {rest[0]} must list torch==..., because torch is too large for a pack"
            )
        fetch(folder, None, present)
    else:
        fetch(folder, ASSUMED_MISSING, set())
    for wheel in sorted(folder.iterdir()):
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
