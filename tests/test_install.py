"""Tests that pip installs this package into an environment without changing other packages.

The tests create small wheels of the other packages. The real pip resolves names, versions and
requirements. To run this package, a test environment refers to the modules that are installed for
the Python that runs the tests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron.adaptive import __version__

from .multiprocess.launch import ROOT
from .support.core_trees import UNPACKED

pytestmark = pytest.mark.slow

NVIDIA = "2.9.0a0+nv25.09"
"""Version of torch in an NVIDIA container. It is a pre-release with a local label."""
CONTAINER = {
    "torch": NVIDIA,
    "megatron-core": "0.19.2",
    "psutil": "7.1.0",
    "numba": "0.61.2",
    "numpy": "2.1.0",
    "tokenizers": "0.22.1",
    "jinja2": "3.1.6",
    "tensorboard": "2.16.2",
    "tqdm": "4.67.1",
    "rich": "14.1.0",
    "matplotlib": "3.10.6",
    "pyyaml": "6.0.2",
    "tomli": "2.2.1",
}
"""Packages in a typical training container in 2026, with their versions."""
ABSENT = {"openpyxl": "3.1.5", "plotly": "6.3.0", "xxhash": "3.5.0"}
"""Packages that the container lacks, with their versions."""
NEEDS = {"megatron-core": ["torch>=2.6.0", "numpy"], "numba": ["numpy>=1.24"]}
INDEX = {"torch": ["2.6.0", "2.13.0"], "megatron-core": ["0.16.1", "0.18.2", "0.19.2", "0.20.0"]}
"""Versions that pip can choose in addition to the versions in the container."""


def write_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, str] | None = None
) -> Path:
    """Writes a wheel that contains only ``files`` and its metadata."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    needs = "".join(f"Requires-Dist: {need}\n" for need in NEEDS.get(name, ()))
    texts = {
        **(files or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in texts.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text)}\n"
    texts[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)
    return wheel


class Environment:
    """Creates a virtual environment, into which the pip of the tests installs packages offline."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"

    def pip(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs pip without the pip settings of this machine, and without the checkout on its path.

        A built checkout contains ``megatron_adaptive.egg-info``, which pip would mistake for an
        installed package.
        """
        variables = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("PIP_") and key != "PYTHONPATH"
        }
        command = [sys.executable, "-m", "pip", "--python", self.python, *arguments]
        return subprocess.run(
            command,
            env={**variables, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def try_install(self, *arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
        """Installs packages from ``folder`` without an index, and returns the pip process."""
        return self.pip("install", "--no-index", "--find-links", folder, *arguments)

    def install(self, *arguments: str | Path, folder: Path) -> None:
        done = self.try_install(*arguments, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment, without access to the checkout."""
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(
            [self.python.parent / command[0], *command[1:]],
            env=variables,
            cwd=self.python.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    def versions(self) -> dict[str, str]:
        """Returns the version of each package that is installed in this environment."""
        code = (
            "import json, sysconfig, importlib.metadata as m; "
            "present = m.distributions(path=[sysconfig.get_path('purelib')]); "
            "print(json.dumps({d.name.lower(): d.version for d in present}))"
        )
        done = self.run("python", "-I", "-c", code)
        versions: dict[str, str] = json.loads(done.stdout)
        return versions


@pytest.fixture
def empty(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


def copy_sources(folder: Path) -> Path:
    """Copies the source files of the package to ``folder``, without files of earlier builds."""
    for name in ("megatron", "csrc", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("pretrain_gpt.py", "conf.sh"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def build_wheel(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Builds a wheel from a copy of the sources in ``folder``, as pip does without a network."""
    sources = copy_sources(folder / "sources")
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-index", "--no-deps"]
    return subprocess.run(
        [*command, "--no-build-isolation", "-w", folder, sources],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a wheel without the C++ extension. It has the same requirements as a full wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    done = build_wheel(folder, MEGATRON_ADAPTIVE_EXTENSION="0")
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Returns a folder of wheels for pip.

    The wheels contain the packages of the container, packages that the container lacks, and newer
    versions.
    """
    folder = tmp_path_factory.mktemp("index")
    for name, version in {**CONTAINER, **ABSENT}.items():
        for other in {version, *INDEX.get(name, ())}:
            write_wheel(folder, name, other)
    shutil.copy(wheel, folder)
    return folder


def pins(versions: Mapping[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in versions.items()]


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"torch": "2.11.0a0+145a3a7bda.nv26.02", "megatron-core": "0.20.0rc0"},
        {"torch": "2.13.0+cpu", "megatron-core": "0.18.0rc1+f00dcafe"},
    ],
    ids=lambda changes: changes.get("megatron-core", "container"),
)
def test_what_is_there_stays_as_it_is(
    empty: Environment, index: Path, tmp_path: Path, changes: dict[str, str]
) -> None:
    present = {**CONTAINER, **changes}
    for name, version in changes.items():
        write_wheel(tmp_path, name, version)
    empty.install("--find-links", tmp_path, *pins(present), folder=index)
    before = empty.versions()
    assert {name: before[name] for name in present} == present
    empty.install("megatron-adaptive", folder=index)
    after = empty.versions()
    assert {name: after.get(name) for name in before} == before
    assert {name: after[name] for name in after.keys() - before.keys()} == {
        **ABSENT,
        "megatron-adaptive": __version__,
    }
    checked = empty.pip("check")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.long
def test_a_constraints_file_holds(empty: Environment, index: Path, tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("\n".join(pins({**CONTAINER, **ABSENT})))
    empty.install("-c", constraints, "megatron-adaptive", folder=index)
    installed = empty.versions()
    assert {name: installed.get(name) for name in ("torch", "megatron-core")} == {
        "torch": NVIDIA,
        "megatron-core": "0.19.2",
    }


def test_constraints_that_cannot_be_met_are_named(
    empty: Environment, index: Path, tmp_path: Path
) -> None:
    write_wheel(tmp_path, "megatron-core", "0.14.0")
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("megatron-core==0.14.0")
    arguments = ("-c", constraints, "--find-links", tmp_path, "megatron-adaptive")
    done = empty.try_install(*arguments, folder=index)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert f"megatron-adaptive {__version__} depends on megatron-core<0.21 and >=0.16.1" in said
    assert "The user requested (constraint) megatron-core==0.14.0" in said
    assert empty.versions() == {}


def test_a_package_that_no_folder_has_is_named(
    empty: Environment, wheel: Path, tmp_path: Path
) -> None:
    for name, version in {**CONTAINER, **ABSENT}.items():
        if name != "xxhash":
            write_wheel(tmp_path, name, version)
    done = empty.try_install(wheel, folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == "ERROR: No matching distribution found for xxhash>=3.4"
    assert empty.versions() == {}


def test_a_wheel_of_another_python_is_refused_by_name(
    empty: Environment, index: Path, wheel: Path, tmp_path: Path
) -> None:
    other = tmp_path / f"megatron_adaptive-{__version__}-cp39-cp39-manylinux_2_28_x86_64.whl"
    shutil.copy(wheel, other)
    done = empty.try_install(other, folder=index)
    assert done.returncode != 0
    assert done.stderr.strip() == (
        f"ERROR: {other.name} is not a supported wheel on this platform."
    )


def test_without_a_compiler_the_wheel_lacks_the_extension_alone(tmp_path: Path) -> None:
    done = build_wheel(tmp_path, CC="no-such-compiler", CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    warnings = [line for line in said if line.startswith("megatron-adaptive: warning:")]
    assert len(warnings) == 1, said
    assert "the C++ extension was not built and is left out: " in warnings[0]
    assert "no-such-compiler" in warnings[0]
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    assert "megatron/adaptive/extension.py" in names
    assert not any(name.endswith(".so") for name in names)


TRAINING = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3
    --mock-data --vocab-size 64 --log-interval 1 --eval-iters 0 --train-iters 2
"""


@pytest.mark.long
def test_a_folder_of_wheels_fills_an_empty_environment_that_trains(
    empty: Environment, wheel: Path, tmp_path: Path
) -> None:
    """Checks an installation with the pre-release of torch that an NVIDIA container has.

    The folder of wheels has no other release of torch. The environment must be able to train.
    """
    core = UNPACKED / "megatron-core==0.19.2"
    triton = next(UNPACKED.glob("triton==*"), None)
    if not core.exists() or triton is None:
        pytest.skip("megatron-core 0.19.2 is missing: run bash prerequisite.sh --versions")
    paths = {"megatron-core": [core], "torch": [*site.getsitepackages(), triton]}
    for name, version in {**CONTAINER, **ABSENT}.items():
        lines = "".join(f"{path}\n" for path in paths.get(name, ()))
        files = {f"{name}-modules.pth": lines} if lines else {}
        write_wheel(tmp_path, name, version, files)
    shutil.copy(wheel, tmp_path)
    empty.install("megatron-adaptive", folder=tmp_path)
    installed = {**CONTAINER, **ABSENT, "megatron-adaptive": __version__}
    if sys.version_info >= (3, 11):
        del installed["tomli"]
    assert empty.versions() == installed
    said = empty.run("megatron-adaptive", "--version").stdout
    assert f"megatron-core 0.19.2, torch {NVIDIA}, " in said
    done = empty.run("python", "-m", "megatron.adaptive", "train", "rank", *TRAINING.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("lm loss: ") == 2


def run_with(path: Sequence[Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs this package's command line with ``path`` at the start of Python's import path."""
    return subprocess.run(
        [sys.executable, "-m", "megatron.adaptive", *arguments],
        env={**os.environ, "PYTHONPATH": ":".join(map(str, [*path, ROOT]))},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def write_core(folder: Path, minor: int) -> Path:
    """Writes the files that define the version of megatron-core, which is 0.``minor``.7rc1."""
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text(
        f"MAJOR = 0\nMINOR = {minor}\nPATCH = 7\nPRE_RELEASE = 'rc1'\n"
    )
    return folder


@pytest.mark.long
def test_the_megatron_core_that_is_imported_is_the_one_told(tmp_path: Path) -> None:
    first, second = (write_core(tmp_path / str(minor), minor) for minor in (20, 21))
    assert "megatron-core 0.20.7rc1, " in run_with([first, second], "--version").stdout
    said = run_with([second, first, second], "doctor").stdout
    (line,) = [line for line in said.splitlines() if "several copies of megatron-core" in line]
    assert line.startswith("warning  megatron-core")
    assert f"0.21.7rc1 in {second}/megatron/core is used, not 0.20.7rc1 in {first}/" in line
