"""Defines a run-time rule: work on the oldest microbatch that has an action ready.

The rule looks at the messages that have arrived at its rank, and picks one of the actions that are
ready. It returns ``None`` to wait for the next message. A forward pass needs memory, so the rule
checks whether it fits below the limit (``--activation-cap``).
"""

from __future__ import annotations

from megatron.adaptive.schedule import Action, ActionKind, RankState, run_time_rule


@run_time_rule()
def oldest_first(state: RankState) -> Action | None:
    """Returns the action that the rank starts now, or ``None`` to wait for the next message."""
    ready = [action for action in state.ready() if state.fits(action)]
    # Other ranks do not wait for weight gradients. So run these if no other action is ready.
    urgent = [action for action in ready if action.kind is not ActionKind.W]
    return min(
        urgent or ready,
        key=lambda action: (action.microbatch, action.kind is ActionKind.F),
        default=None,
    )
