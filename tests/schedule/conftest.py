"""Disables the deadline of property tests, because the machine may be busy."""

from __future__ import annotations

from hypothesis import settings

from megatron.adaptive.schedule.action import Action, ActionKind
from megatron.adaptive.schedule.rank_state import RankState

settings.register_profile("megatron-adaptive", deadline=None)
settings.load_profile("megatron-adaptive")


def actions(text: str) -> tuple[Action, ...]:
    """Returns the actions that ``text`` lists, such as ``F0-0+ B0-1 W0-0.1``."""
    actions = []
    for word in text.split():
        paired, word = word.endswith("+"), word.rstrip("+")
        chunk, microbatch, piece = f"{word[1:]}-0".replace(".", "-").split("-")[:3]
        actions.append(Action(ActionKind(word[0]), int(chunk), int(microbatch), int(piece), paired))
    return tuple(actions)


def run(state: RankState, *todo: Action | str) -> None:
    """Starts and finishes each action of ``todo``, in order, in the state of a rank.

    Each item of ``todo`` is an action, or a string of actions such as ``F0-0 B0-0``.
    """
    for action in (actions(item) if isinstance(item, str) else (item,) for item in todo):
        for each in action:
            assert state.start(each), state.why_not(each)
            state.finish(each)
