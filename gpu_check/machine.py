"""Finds the GPU, the driver, the commit of the sources and the default folder for results."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

from harness.report import ROOT, one_line


def nvidia_smi() -> str:
    """Returns the driver's report about the GPUs, or the reason why there is no report."""
    if shutil.which("nvidia-smi") is None:
        return "there is no nvidia-smi"
    query = "name,driver_version,memory.total,memory.used,compute_mode,clocks.max.sm"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi failed: {error}"
    return (done.stdout or done.stderr).strip()


def card_and_driver(csv: str) -> dict[str, str]:
    """Returns the first GPU's name and the driver's version, or an empty dict if there is no GPU.

    Args:
        csv: Output of :func:`nvidia_smi`, with a header line and one line per GPU.
    """
    lines = [[cell.strip() for cell in line.split(",")] for line in csv.splitlines()]
    if len(lines) < 2 or lines[0][:2] != ["name", "driver_version"] or len(lines[1]) < 2:
        return {}
    return {"card": lines[1][0], "driver": lines[1][1]}


def commit(pack: Path | None) -> str:
    """Returns the checked-out commit, with a suffix if files were modified, or why it is unknown.

    Args:
        pack: Folder created by ``scripts/gpu_pack.sh``, or ``None``. It contains the commit, which
            is used if the sources have no Git history.
    """
    if pack is not None and not (ROOT / ".git").exists() and (pack / "commit").exists():
        return (pack / "commit").read_text(encoding="utf-8").strip()
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip() or f"unknown: {one_line(done.stderr)}"


def default_output(facts: dict[str, str], *, rehearse: bool) -> Path:
    """Returns the default folder for results.

    Results of runs on a GPU are written to ``results/``, which is under version control. The name
    of the folder contains the date, the GPU and the driver.

    Args:
        facts: Result of :func:`card_and_driver`.
        rehearse: Whether the check runs without a GPU.
    """
    if rehearse or "card" not in facts:
        return ROOT / "runs" / time.strftime("gpu-check-%Y%m%d-%H%M%S")
    card = re.sub(r"[^a-z0-9.]+", "-", f"{facts['card']} {facts['driver']}".lower()).strip("-")
    return ROOT / "results" / f"gpu-check-{time.strftime('%Y-%m-%d-%H%M%S')}-{card}"
