"""Tests the settings and the flags of the plugin."""

from __future__ import annotations

import argparse
import sys
import types
from typing import Any

import pytest

from megatron.adaptive.config.flags import fields_of
from megatron.adaptive.config.schedule import ScheduleConfig
from megatron.adaptive.config.schedule_specs import schedule_spec
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.plugin.settings import (
    Settings,
    add_arguments,
    megatron_arguments,
    timeout_of_groups,
)

CHOICES = next(
    spec.choices for spec in fields_of(ScheduleConfig) if spec.dest == "pipeline_schedule"
)


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_is_possible(name: str) -> None:
    path = "order.csv" if name == "file" else None
    settings = Settings(schedule=name, schedule_file=path)
    spec = schedule_spec(name)
    assert settings.kind == ("v" if spec.is_v_only else "loop")
    assert settings.is_rule == (spec.kind == "rule" or name == "auto")
    # The schedule decides whether backward passes are split. With "by default", the decision also
    # depends on the model.
    decided = {"always": True, "never": False, "on request": False, "by default": None}
    assert settings.splits is decided[spec.splits_backward]


def test_kernels_are_recorded_where_settings_or_megatron_lms_flags_say() -> None:
    flags = argparse.Namespace(profile_ranks=[3], profile_step_start=5, profile_step_end=7)
    assert not Settings().kernel_iterations(0, flags)
    kernels = Settings(trace_detail="kernels")
    assert kernels.kernel_iterations(0, None) == range(10, 12)
    assert (kernels.kernel_iterations(0, flags), kernels.kernel_iterations(3, flags)) == (
        range(0),
        range(5, 7),
    )
    narrowed = Settings(trace_detail="kernels", profile_ranks=[1], profile_step_end=9)
    assert narrowed.kernel_iterations(1, flags) == range(5, 9)
    with pytest.raises(ConfigError, match="use the same profiler"):
        narrowed.kernel_iterations(1, argparse.Namespace(profile=True, use_pytorch_profiler=True))
    for wrong in ({"profile_ranks": [-1]}, {"profile_step_start": "a"}, {"profile_step_end": -2}):
        with pytest.raises(ConfigError, match="must be a non-negative integer"):
            Settings(trace_detail="kernels", **wrong)
    with pytest.raises(ConfigError, match="must be greater than profile_step_start"):
        Settings(profile_step_start=4, profile_step_end=4)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"schedule": "zb-v", "placement": "loop"},
            "--pipeline-schedule zb-v and --pipeline-placement loop exclude each other .*",
        ),
        (
            {"schedule": "1f1b", "placement": "v"},
            "--pipeline-placement v requires --pipeline-schedule adaptive, auto, .*, got "
            "--pipeline-schedule 1f1b; .*",
        ),
        ({"placement": "w"}, "placement: 'w' is not one of loop, v"),
        ({"schedule": "file"}, "--pipeline-schedule file requires --schedule-file; .*"),
        (
            {"schedule": "megatron", "keyed_dropout": True},
            "--keyed-dropout True and --pipeline-schedule megatron exclude each other .*",
        ),
        ({"schedule": "nimble"}, "schedule: 'nimble' is neither one of .*"),
        (
            {"schedule": "1f1b", "activation_cap": 4},
            "--activation-cap 4 requires --pipeline-schedule adaptive.* got .* 1f1b .*",
        ),
        ({"activation_cap": float("nan")}, "activation_cap: nan is not a finite number"),
        (
            {"schedule": "gpipe", "split_backward": True},
            "--split-backward True requires .* zb-h1.*, got --pipeline-schedule gpipe .*",
        ),
        (
            {"schedule": "zb-h1", "split_backward": False},
            "--split-backward False and --pipeline-schedule zb-h1 exclude each other .*",
        ),
        ({"weight_pieces": 0}, "weight_pieces: 0 is too small; give at least 1"),
        ({"timeout_s": float("inf")}, "timeout_s: inf is not a finite number"),
    ],
)
def test_what_is_not_possible(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}$"):
        Settings(**values)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    assert add_arguments(parser) is parser
    return parser.parse_args(arguments)


def test_settings_without_effect_are_named_in_one_line() -> None:
    assert Settings(trace_detail="layers", trace_dir="traces").warning_about_effects() is None
    assert Settings(weight_pieces=2).warning_about_effects() is None
    idle = Settings(trace_detail="layers", weight_pieces=2, split_backward=False, transport="tcp")
    assert idle.warning_about_effects() == (
        "warning: these flags have no effect: --trace-detail layers (needs --trace-dir), "
        "--weight-pieces 2 (needs --split-backward True); remove them, or set what they need"
    )


def test_flags_win_over_settings() -> None:
    base = Settings(schedule="hinted", activation_cap=3, trace_dir="here")
    flags = "--activation-cap 5 --split-backward True --weight-pieces 2 --pipeline-timeout-s 9"
    assert base.overridden(parse(*flags.split())) == Settings(
        schedule="hinted",
        activation_cap=5,
        split_backward=True,
        weight_pieces=2,
        trace_dir="here",
        timeout_s=9,
    )
    assert base.overridden(parse("--pipeline-schedule", "dfc")).schedule == "dfc"
    assert base.overridden(parse("--pipeline-placement", "v")).kind == "v"


@pytest.mark.parametrize("arguments", [None, argparse.Namespace(seq_length=4), parse()])
def test_without_flags_settings_stay(arguments: Any) -> None:
    base = Settings(schedule="hinted", activation_cap=3, trace_dir="here")
    assert base.overridden(arguments) == base


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--pipeline-schedule", "forward-only"), "'forward-only' is not one of 1f1b, adaptive"),
        (("--split-backward", "maybe"), "'maybe' is not True or False"),
    ],
)
def test_a_wrong_flag_says_why(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert line in capsys.readouterr().err


def test_arguments_of_megatron_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_yet() -> Any:
        raise AssertionError("args is not initialized.")

    training: Any = types.ModuleType("megatron.training")
    monkeypatch.delitem(sys.modules, "megatron.training", raising=False)
    assert megatron_arguments() is None
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    assert megatron_arguments() is None
    training.get_args = not_yet
    assert megatron_arguments() is None
    training.get_args = lambda: "the arguments"
    assert megatron_arguments() == "the arguments"


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        (None, 600),
        (argparse.Namespace(distributed_timeout_minutes=2), 120),
        (
            argparse.Namespace(
                distributed_timeout_minutes=2, distributed_timeout_seconds_after_init=45
            ),
            45,
        ),
    ],
)
def test_ranks_wait_as_long_as_megatron_lm_does(arguments: Any, seconds: int) -> None:
    assert timeout_of_groups(arguments).total_seconds() == seconds


@pytest.mark.parametrize(
    "values",
    [
        {"profile_ranks": (1, "1")},
        {"profile_ranks": (1, 1.5)},
        {"profile_ranks": (True, 0)},
        {"profile_ranks": 1},
        {"profile_ranks": "01"},
        {"profile_step_start": -1},
    ],
)
def test_ranks_and_steps_to_profile_are_whole_numbers(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ConfigError, match=f"^(each rank in )?{name} must be a "):
        Settings(trace_detail="kernels", **values)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_iteration_to_profile_is_an_error_on_all_ranks(rank: int) -> None:
    """Checks that an error is raised on all ranks if profiling would end before it starts."""
    settings = Settings(trace_detail="kernels", trace_dir="traces", profile_step_start=20)
    with pytest.raises(ConfigError, match="start=20 and profile_step_end=12"):
        settings.kernel_iterations(rank, None)
    arguments = argparse.Namespace(profile_step_end=24, profile_ranks=[1], profile=True)
    expected = range(20, 24) if rank == 1 else range(0)
    assert settings.kernel_iterations(rank, arguments) == expected
    arguments.use_pytorch_profiler = True
    with pytest.raises(ConfigError, match="use the same profiler"):
        settings.kernel_iterations(rank, arguments)
