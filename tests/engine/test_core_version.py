"""Tests that supported releases of megatron-core are accepted, and other releases are rejected."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import megatron
from megatron.adaptive import accelerator
from megatron.adaptive.errors import SetupError

accelerator.install()

from megatron.adaptive.engine import core_version  # noqa: E402


def check() -> None:
    """Checks the release of megatron-core in the same way as the plug-in does."""
    core_version.check(oldest=(0, 15), remedy="use another")


def finalize_0_15(model: Any, num_tokens: Any = None, pg_collection: Any = None) -> None: ...


def finalize_0_14(model: Any, num_tokens: Any = None) -> None: ...


def first_val_reordered(forward_only: Any, first_val_step: Any, cond: Any) -> None: ...


def test_the_installed_one_fits() -> None:
    check()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"finalize_model_grads": finalize_0_15}, None),
        (
            {"finalize_model_grads": finalize_0_14},
            "its finalize_model_grads takes (model, num_tokens), but the pipeline engine passes "
            "(model, num_tokens, pg_collection)",
        ),
        (
            {"check_first_val_step": first_val_reordered},
            "its check_first_val_step takes (forward_only, first_val_step, cond), but the "
            "pipeline engine passes (first_val_step, forward_only, cond)",
        ),
        ({"forward_step": None}, "it has no schedule forward_step"),
    ],
)
def test_others_are_told_by_name(change: dict[str, Any], line: str | None) -> None:
    functions = {name: getattr(core_version.schedules, name, None) for name in core_version._CALLS}
    functions |= {"finalize_model_grads": core_version.finalize_model_grads, **change}
    assert core_version.why_not(functions, has_groups=True) == line


def test_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_version.schedules, "check_first_val_step", first_val_reordered)
    with pytest.raises(SetupError, match=r"^megatron-core \S+: its check_first_val_step .*$"):
        check()
    monkeypatch.undo()
    monkeypatch.delattr(core_version.process_groups_config, "ProcessGroupCollection")
    with pytest.raises(SetupError, match="it has no ProcessGroupCollection, which .*use"):
        check()


def test_a_newer_one_runs_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_version.package_info, "MINOR", core_version.NEWEST[1] + 1)
    with pytest.warns(
        UserWarning, match="is newer than the newest release .*; its functions are compatible"
    ) as seen:
        check()
    assert len(seen) == 1


def test_an_older_one_than_the_caller_supports_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_version.package_info, "MINOR", 14)
    with pytest.raises(SetupError, match=r"^megatron-core \S+: it is older .*; use another$"):
        check()


def test_the_third_number_of_a_release_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (0, core_version.package_info.MINOR, core_version.package_info.PATCH)
    core_version.check(oldest=numbers, remedy="use another")
    monkeypatch.setattr(core_version.package_info, "PATCH", -1)
    with pytest.raises(SetupError, match="it is older"):
        core_version.check(oldest=numbers, remedy="use another")


@pytest.mark.parametrize(("rank", "warnings_count"), [("0", 1), ("1", 0)])
def test_other_copies_on_the_path_give_the_first_rank_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str, warnings_count: int
) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 14\nPATCH = 2\nPRE_RELEASE = ''\n")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(megatron, "__path__", [*megatron.__path__, str(core.parent)])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        check()
    lines = [str(warning.message) for warning in seen]
    assert len(lines) == warnings_count
    for line in lines:
        assert re.search(
            rf"several copies of megatron-core .* is used, not 0.14.2 in {core}; remove one", line
        )
