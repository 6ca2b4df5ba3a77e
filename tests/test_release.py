"""Tests that all files that state the package's version or its commands agree with the package."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import megatron.adaptive

ROOT = Path(__file__).parent.parent


def test_all_places_name_one_version() -> None:
    version = megatron.adaptive.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    sections = re.findall(
        r"^## \[(.+?)\] - (\d{4}-\d{2}-\d{2})$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert sections[0] == (version, str(citation["date-released"]))


def test_workflows_run_commands_that_exist() -> None:
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    assert {"checks", "docs", "tests", "wheels"} <= {path.stem for path in workflows}
    for path in workflows:
        jobs = yaml.safe_load(path.read_text())["jobs"]
        for job in jobs.values():
            assert job["timeout-minutes"] > 0
            for step in job["steps"]:
                for script in re.findall(r"\bbash (\S+\.sh)", step.get("run", "")):
                    assert (ROOT / script).is_file(), script
