"""What ``auto`` does with a choice: use it, move for it, or say what would be gained."""

from __future__ import annotations

from megatron.adaptive import accelerator

accelerator.install()

from megatron.adaptive.rebalance.auto import decide  # noqa: E402
from megatron.adaptive.schedule.auto import ScheduleChoice  # noqa: E402
from megatron.adaptive.schedule.compare import make_candidate  # noqa: E402
from megatron.adaptive.schedule.placement import Placement  # noqa: E402

PRESENT = Placement(num_ranks=2, num_chunks=2, kind="v")
NEAR = make_candidate("zb-v", 2, 2, 8)
FAR = make_candidate("interleaved", 2, 2, 8)
STAY = ScheduleChoice(best=NEAR, outcomes=(), reason="auto takes zb-v")
MOVE = ScheduleChoice(best=FAR, outcomes=(), reason="auto takes interleaved", gain=0.125, stay=STAY)


def test_a_choice_under_the_present_placement_is_used() -> None:
    decision = decide(STAY, PRESENT, movable=False)
    assert (decision.stay, decision.move, decision.text) == (NEAR, None, "auto takes zb-v")


def test_a_choice_elsewhere_moves_the_stages() -> None:
    decision = decide(MOVE, PRESENT, movable=True)
    assert (decision.stay, decision.move) == (NEAR, FAR)
    assert decision.text == "auto takes interleaved"


def test_where_stages_cannot_move_the_log_says_what_would_be_gained() -> None:
    decision = decide(MOVE, PRESENT, movable=False)
    assert (decision.stay, decision.move) == (NEAR, None)
    assert decision.text.startswith("auto takes zb-v; a loop would take 12.5% less")
    assert "--save" in decision.text
    assert decision.text.endswith("--pipeline-placement loop to start with it")


def test_without_memory_to_stay_it_says_so() -> None:
    choice = ScheduleChoice(best=FAR, outcomes=(), reason="auto takes interleaved")
    decision = decide(choice, PRESENT, movable=False)
    assert (decision.stay, decision.move) == (None, None)
    assert "memory is short" in decision.text
