"""Tests that users' schedules run like built-in schedules, and tests errors about them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.config.schedule_specs import (
    built_in_schedules,
    no_function,
    schedule_spec,
    selectable_names,
)
from megatron.adaptive.errors import ConfigError, ScheduleError
from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.catalog import make_candidate, make_schedule, placement_for
from megatron.adaptive.schedule.choose_by_simulation import choose, evaluate
from megatron.adaptive.schedule.numba_kernels import is_known
from megatron.adaptive.schedule.policy import Follow, RulePolicy
from megatron.adaptive.schedule.stage_placement import Placement
from megatron.adaptive.schedule.workload import StageProfile, StageTimes
from megatron.adaptive.trace.trace_format import REASONS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "own_schedule"
HEAD = """
from megatron.adaptive.schedule import Action, ActionKind, fixed_order, run_time_rule
F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
"""
RULE = "@run_time_rule()\ndef choice(state):\n    "
ORDER = "@fixed_order(chunks='one')\ndef choice(placement, count):\n    "

Module = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """Yields a function that writes a module with a schedule, and returns the schedule's name."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def write(body: str) -> str:
        name = f"own_{tmp_path.name.strip('_')}_{len(made)}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(HEAD + body)
        made.append(name)
        return f"{name}:choice"

    yield write
    for name in made:
        sys.modules.pop(name, None)


def test_every_name_has_its_function() -> None:
    for name, spec in built_in_schedules().items():
        assert spec.name == name
        if spec.kind == "rule":
            assert is_known(spec.function)
        elif spec.kind == "fixed":
            placement = placement_for(name, 2, spec.least_chunks)
            (policy, _) = make_candidate(name, 2, spec.least_chunks, 8).policies(8)
            assert isinstance(policy, Follow)
            assert placement.kind in spec.placements
        else:
            assert spec.function is no_function
    assert set(selectable_names()) == built_in_schedules().keys() - {"forward-only"}


NEW_FIXED = """
from megatron.adaptive.config.schedule_specs import ScheduleSpec
from megatron.adaptive.schedule.fixed_in_loop import interleaved

def again(placement, num_microbatches):
    return interleaved(placement, num_microbatches)

SCHEDULES = (ScheduleSpec(name="again", function=again, chunks="several", planned="by default"),)
"""


def test_one_file_adds_a_fixed_order_to_this_package(tmp_path: Path) -> None:
    """Checks that the flags, the simulator and the planner know a schedule from a new file.

    The check runs in a new process, because the names of schedules are read on import.
    """
    (tmp_path / "fixed_again.py").write_text(NEW_FIXED)
    code = f"""
from megatron.adaptive import schedule
schedule.__path__.append({str(tmp_path)!r})
from megatron.adaptive.config.trainer import flag_specs
from megatron.adaptive.planner.propose import SCHEDULES
from megatron.adaptive.planner.chunk_partition import SEARCHED
from megatron.adaptive.schedule.catalog import make_schedule
from megatron.adaptive.schedule.stage_placement import Placement
placement = Placement(num_ranks=2, num_chunks=2)
assert "again" in flag_specs()["pipeline_schedule"].choices
again, interleaved = (make_schedule(name, placement, 4) for name in ("again", "interleaved"))
assert again.orders == interleaved.orders
assert "again" in SCHEDULES and "again" in SEARCHED
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_reasons_of_rules_are_words_of_traces() -> None:
    for spec in built_in_schedules().values():
        is_single = spec.kind == "rule" and spec.name != "hinted"
        assert (spec.reasons is not None) == is_single
        assert {*(spec.reasons or ())} <= {*REASONS}


def test_a_fixed_order_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    name = "eager_1f1b:eager_1f1b"
    schedule = make_schedule(name, Placement(num_ranks=3, num_chunks=1), 5)
    rows = [" ".join(f"{action.kind}{action.microbatch}" for action in o) for o in schedule.orders]
    drawn = re.findall(r"rank \d   (.*)", (EXAMPLES / "eager_1f1b.py").read_text())
    assert rows == drawn
    with pytest.raises(ScheduleError, match="requires a loop placement with 1 chunk"):
        make_schedule(name, Placement(num_ranks=3, num_chunks=2), 5)


def test_a_rule_of_a_user_equals_ours(module: Module) -> None:
    name = module(
        RULE + "ready = [a for a in state.ready() if state.fits(a)]\n"
        "    backwards = [a for a in ready if a.kind is B]\n"
        "    return (backwards or ready or [None])[-1 if backwards else 0]\n"
    )
    profile = StageProfile(
        times=StageTimes.equal(4, forward_s=1.0, backward_s=1.0, weight_s=1.0), action_sigma=0.3
    )
    built_in, custom = (make_candidate(rule, 4, 1, 12, weight_pieces=1) for rule in ("dfc", name))
    assert not isinstance(custom.policies(12)[0], RulePolicy)
    both = [evaluate(candidate, 12, profile, range(3)) for candidate in (built_in, custom)]
    assert both[0].makespans_s == both[1].makespans_s
    assert both[0].peak_units == both[1].peak_units


def test_auto_takes_a_schedule_of_a_user_if_it_is_faster(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    also = ["eager_1f1b:eager_1f1b", "oldest_first:oldest_first"]
    profile = StageProfile(times=StageTimes.equal(2, forward_s=1.0, backward_s=2.0))
    options: dict[str, Any] = {
        "placement": Placement(num_ranks=2, num_chunks=1),
        "num_microbatches": 4,
        "most": 4.0,
        "splittable": False,
    }
    choice = choose(profile, also=also, **options)
    assert set(also) < {outcome.candidate.name for outcome in choice.outcomes}
    assert not set(also) & {o.candidate.name for o in choose(profile, **options).outcomes}


def test_an_installed_package_offers_a_schedule_by_name(module: Module, tmp_path: Path) -> None:
    target = module(RULE + "return next(iter(state.ready()), None)\n")
    info = tmp_path / "their_schedules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-schedules\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[megatron_adaptive.schedules]\ntheirs = {target}\n")
    spec = schedule_spec("theirs")
    assert spec.name == "theirs"
    assert spec.is_rule
    assert spec.is_own


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("no_such_module_here:x", "module 'no_such_module_here' cannot be imported: ModuleNotF"),
        ("json:no_such_name", r"json/__init__\.py has no 'no_such_name'"),
        ("json:dumps", "is function .*; decorate a function with fixed_order or run_time_rule"),
        ("2f2b", "'2f2b' is neither one of 1f1b, adaptive, .*package.module:name"),
    ],
)
def test_a_name_that_leads_nowhere(name: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        schedule_spec(name)


def test_a_module_that_raises(module: Module) -> None:
    with pytest.raises(ConfigError, match="cannot be imported: ZeroDivisionError: division by"):
        schedule_spec(module("1 / 0\n"))


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("return {}['none']", r"rank 0: the function raised KeyError: 'none'; ready: F0-0"),
        (
            "return 7",
            r"rank 0: the function must return one of the actions in state.ready\(\), .* got 7",
        ),
        ("return Action(B, 0, 0)", r"rank \d: B0-0 cannot start: its own forward F0-0 has not"),
        ("return None", r"deadlock: no rank can continue: rank 0 waits for"),
        (
            "return next((a for a in state.ready() if a.kind is F), None)"
            " or next(iter(state.ready()), None)",
            r"rank \d: F0-\d exceeds the activation cap of 2 microbatches; .* if state.fits",
        ),
    ],
)
def test_a_rule_that_breaks_the_rules(module: Module, body: str, line: str) -> None:
    name = module(f"{RULE}{body}\n")
    candidate = make_candidate(name, 2, 1, 8, cap=2.0)
    with pytest.raises(ScheduleError) as raised:
        candidate.policies(8)
    text = str(raised.value)
    assert re.search(rf"schedule {name} \(.*\.py:\d+\)", text), text
    assert re.search(line, text), text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("return count / 0", "raised ZeroDivisionError for 2 ranks and 3 microbatches"),
        (
            "return [[1]]",
            r"rank 0, position 0: the function must return one tuple of Actions for .*, got 1",
        ),
        ("return []", "an order for each of the 2 ranks, got 0"),
        ("return [[Action(F, 0, 0)]] * 2", r"rank 0, position \d.*: list each action once"),
        (
            "return [[Action(k, 0, n) for n in range(count) for k in (B, F)]] * 2",
            r"rank 0, position 0: B0-0 cannot be here: its own forward F0-0 has not finished",
        ),
        (
            "return [[Action(k, 0, n) for n in range(count) for k in (F, B, W)]] * 2",
            r"rank 0: with splits_backward=False, an order must contain no W, got W0-0",
        ),
    ],
)
def test_an_order_that_is_not_valid(module: Module, body: str, line: str) -> None:
    name = module(f"{ORDER}{body}\n")
    with pytest.raises(ScheduleError, match=line) as raised:
        make_schedule(name, Placement(num_ranks=2, num_chunks=1), 3)
    assert re.search(r"\.py:\d+", str(raised.value))


def test_actions_are_those_of_the_engine() -> None:
    from megatron.adaptive import schedule

    assert schedule.Action is Action
    assert schedule.ActionKind is ActionKind
    with pytest.raises(AttributeError, match="has no attribute 'none'"):
        schedule.none  # noqa: B018
