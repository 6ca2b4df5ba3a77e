"""Which megatron-core the engine can run on, told by the signatures that it had over time."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.adaptive import accelerator
from megatron.adaptive.errors import SetupError

accelerator.install()

from megatron.adaptive.plugin import versions  # noqa: E402


def finalize_0_15(model: Any, num_tokens: Any = None, pg_collection: Any = None) -> None: ...


def finalize_0_14(model: Any, num_tokens: Any = None) -> None: ...


def first_val_reordered(forward_only: Any, first_val_step: Any, cond: Any) -> None: ...


def test_the_installed_one_fits() -> None:
    versions.check()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"finalize_model_grads": finalize_0_15}, None),
        (
            {"finalize_model_grads": finalize_0_14},
            "its finalize_model_grads takes (model, num_tokens) where the pipeline engine gives "
            "(model, num_tokens, pg_collection)",
        ),
        (
            {"check_first_val_step": first_val_reordered},
            "its check_first_val_step takes (forward_only, first_val_step, cond) where the "
            "pipeline engine gives (first_val_step, forward_only, cond)",
        ),
        ({"forward_step": None}, "it has no forward_step among its schedules"),
    ],
)
def test_others_are_told_by_name(change: dict[str, Any], line: str | None) -> None:
    functions = {name: getattr(versions.schedules, name, None) for name in versions._CALLS}
    functions |= {"finalize_model_grads": versions.finalize_model_grads, **change}
    assert versions.why_not(functions, has_groups=True) == line


def test_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.schedules, "check_first_val_step", first_val_reordered)
    with pytest.raises(SetupError, match=r"^megatron-core 0\.16\.1: its check_first_val_step .*$"):
        versions.check()
    monkeypatch.undo()
    monkeypatch.delattr(versions.process_groups_config, "ProcessGroupCollection")
    with pytest.raises(SetupError, match="it has no ProcessGroupCollection, by which .*use"):
        versions.check()
