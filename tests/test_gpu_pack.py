"""Tests the pack, a folder with which the GPU check runs on a machine without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cpp_tests import compiler_or_skip
from tests.multiprocess.launch import ROOT

PINS = {
    name: version
    for file in ("requirements.txt", "requirements-gpu.txt")
    for name, version in re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / file).read_text(), re.MULTILINE)
}


def write_wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """Writes a wheel of the package ``name`` that contains only metadata."""
    stem = f"{name.replace('-', '_')}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Returns a folder of wheels that is used in place of the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(
        folder, "megatron-core", PINS["megatron-core"], "torch", "numpy", "te; extra == 'x'"
    )
    write_wheel(folder, "plotly", PINS["plotly"], "narwhals>=1", "packaging")
    write_wheel(folder, "openpyxl", PINS["openpyxl"], "et-xmlfile")
    write_wheel(folder, "et-xmlfile", "2.0.0")
    write_wheel(folder, "nvidia-ml-py", PINS["nvidia-ml-py"])
    write_wheel(folder, "narwhals", "2.0.0")
    return folder


def pack(index: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_pack.sh"), *map(str, arguments)],
        env={**variables, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.long
def test_a_pack_has_wheels_and_an_extension_without_symbols(index: Path, tmp_path: Path) -> None:
    compiler_or_skip()
    folder = tmp_path / "pack"
    done = pack(index, "--python", sys.executable, folder)
    assert done.returncode == 0, done.stderr
    names = {path.name.partition("-")[0] for path in (folder / "wheels").iterdir()}
    assert names == {"megatron_core", "plotly", "openpyxl", "et_xmlfile", "nvidia_ml_py"}
    (extension,) = (folder / "extension").glob("_C*.so")
    content = extension.read_bytes()
    assert content.startswith(b"\x7fELF")
    assert b".symtab" not in content
    assert re.search(r"^.*: \d+ MiB$", done.stdout, re.MULTILINE)
    last = done.stdout.splitlines()[-1]
    assert last.endswith(f"bash scripts/gpu_check.sh --pack {folder}")
    digest = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_pack.sh"), "--digest"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (folder / "sources.sha256").read_text() == digest.stdout


def fetch(index: Path, folder: Path, *installed: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    variables = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    return subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts" / "pack_wheels.py"),
            str(folder),
            *map(str, installed),
        ],
        env={**variables, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_what_a_machine_lacks_comes_with_what_that_requires(index: Path, tmp_path: Path) -> None:
    listed = tmp_path / "installed.txt"
    lacking = ("plotly", "megatron-core", "nvidia-ml-py")
    there = [f"{name}==1" for name in PINS if name not in lacking]
    listed.write_text("\n".join([*there, "torch==2.11.0", "packaging @ file:///x", "pytest==9"]))
    done = fetch(index, tmp_path / "wheels", listed)
    assert done.returncode == 0, done.stderr
    names = {path.name.partition("-")[0] for path in (tmp_path / "wheels").iterdir()}
    assert names == {"plotly", "narwhals", "megatron_core", "nvidia_ml_py"}


def test_without_a_list_a_pack_has_what_most_machines_lack(index: Path, tmp_path: Path) -> None:
    """Checks that a pack contains the usually missing packages if no list of packages is given."""
    done = fetch(index, tmp_path / "wheels")
    assert done.returncode == 0, done.stderr
    names = {path.name.partition("-")[0] for path in (tmp_path / "wheels").iterdir()}
    assert names == {"megatron_core", "plotly", "openpyxl", "et_xmlfile", "nvidia_ml_py"}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("numpy==2.0\n", "must list torch==..., because torch is too large for a pack"),
        ("Package    Version\n", "'Package    Version' is not a line of pip freeze"),
        ("torch==2.11.0\nnumba==1\n", "pip found no wheel of "),
    ],
)
def test_a_list_that_does_not_do_is_named(
    text: str, rule: str, index: Path, tmp_path: Path
) -> None:
    listed = tmp_path / "installed.txt"
    listed.write_text(text)
    done = fetch(index, tmp_path / "wheels", listed)
    assert done.returncode == 1
    assert rule in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ("--pyton x", "unknown option '--pyton'"),
        ("--python", "--python needs a path"),
        ("--python /bin/false", "--python /bin/false cannot import pybind11 and setuptools"),
        (f"--python {sys.executable} --installed gone.txt", "gone.txt is not a readable file"),
    ],
)
def test_bad_input_is_one_line(arguments: str, rule: str, tmp_path: Path) -> None:
    done = pack(tmp_path, *arguments.split())
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert rule in done.stderr
