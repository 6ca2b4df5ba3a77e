"""Defines the parts of the GPU check, with their commands, planned times and requirements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.report import ROOT

NO_GPU = "there is no GPU"
STEPS = ROOT / "gpu_check" / "steps.py"
ALWAYS = ("device",)
"""Names of parts that always run. The part ``device`` detects the GPUs that other parts need."""
_IN_PARTS_OF_THEIR_OWN = tuple(
    f"test_{name}.py"
    for name in ("cuda_ipc", "equivalence", "pipeline", "resume", "training", "transport")
)
_MEMORY_TEST = "gpu/test_memory.py::test_too_large_a_batch_says_what_to_lower"


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of the GPU check that runs as a separate program.

    Attributes:
        name: Name of the part and of its files.
        command: Command line. ``{python}`` stands for the Python of the new environment, ``{json}``
            for the path of the result, and ``{limit}`` for the time limit in seconds.
        planned_s: Planned duration in seconds. Earlier parts leave this much time for the part.
        needs: Requirements of the part. Each entry is the name of a requirement, and the reason
            that is reported if it is not met.
        tests: Whether the command runs pytest.
    """

    name: str
    command: tuple[str, ...]
    planned_s: float
    needs: tuple[tuple[str, str], ...] = ()
    tests: bool = False


def parts(*, rehearse: bool) -> list[Part]:
    """Returns the parts that run after the set-up. The most important parts come first."""
    standin = ("transport/test_between_gpus.py",) if rehearse else ()
    others = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    gpu = () if rehearse else (("gpus", NO_GPU),)
    two_gpus = ("two GPUs", "NCCL refuses two ranks on one GPU, and there is only one")
    engine = ("transformer_engine", "Transformer Engine is not installed")

    def steps(name: str, planned_s: float, *needs: tuple[str, str]) -> Part:
        return _steps(name, planned_s, needs, tiny=rehearse)

    def tests(name: str, planned_s: float, *files: str) -> Part:
        return _tests(name, planned_s, files, gpu)

    return [
        steps("device", 20),
        tests("ipc", 50, "gpu/test_cuda_ipc.py", *standin),
        tests("equivalence", 40, "gpu/test_equivalence.py"),
        tests("pipeline", 30, "gpu/test_pipeline.py"),
        steps("pp1", 60, *gpu),
        steps("pp2", 75, *gpu),
        steps("memory", 15, *gpu),
        tests("resume", 60, "gpu/test_resume.py"),
        steps("v", 45, *gpu),
        tests("transports", 20, "gpu/test_transport.py"),
        tests("training", 50, "gpu/test_training.py"),
        tests(
            "others",
            45,
            *(f"gpu/{name}" for name in others if name not in _IN_PARTS_OF_THEIR_OWN),
            f"--deselect=tests/{_MEMORY_TEST}",
        ),
        steps("nccl", 45, *gpu, two_gpus),
        steps("te", 45, *gpu, engine),
        tests("oom", 20, _MEMORY_TEST),
    ]


def _steps(name: str, planned_s: float, needs: Sequence[tuple[str, str]], *, tiny: bool) -> Part:
    """Returns the part ``name``, which runs ``steps.py``."""
    command = ("{python}", str(STEPS), "--part", name, "--json", "{json}", "--limit", "{limit}")
    return Part(
        name=name,
        command=(*command, *["--tiny"] * tiny),
        planned_s=planned_s,
        needs=(("torch", "torch is missing"), *needs),
    )


def _tests(
    name: str, planned_s: float, files: Sequence[str], needs: Sequence[tuple[str, str]]
) -> Part:
    """Returns a part that runs the tests in ``files``. The list may also contain pytest options."""
    # Ignore the pytest options in pyproject.toml, because they need plugins that may not be
    # installed.
    command = "{python} -m pytest -v -rfEs -o addopts=--import-mode=importlib".split()
    paths = (file if file.startswith("-") else f"tests/{file}" for file in files)
    return Part(
        name=name,
        command=(*command, *paths),
        planned_s=planned_s,
        needs=(("torch", "torch is missing"), ("pytest", "pytest is missing"), *needs),
        tests=True,
    )


def set_up_part(pack: Path | None = None) -> Part:
    """Returns the part that installs the requirements of the other parts.

    Args:
        pack: Folder created by ``scripts/gpu_pack.sh``, for a machine without a network.
    """
    command = ["bash", "scripts/gpu_check.sh", "--set-up"]
    if pack is not None:
        command.append(str(pack))
    return Part(name="set-up", command=tuple(command), planned_s=30)


def chosen_parts(names: Sequence[str] | None, *, rehearse: bool) -> list[Part]:
    """Returns the parts in ``names`` and those that always run. ``None`` stands for all parts."""
    every = parts(rehearse=rehearse)
    if names is None:
        return every
    return [part for part in every if part.name in (*ALWAYS, *names)]
