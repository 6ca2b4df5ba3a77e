"""Defines a run-time rule that selects the oldest microbatch for which an action is ready.

An action is ready if the messages that it needs have arrived at the rank. If no action is ready,
the rule returns ``None`` to wait for the next message. A forward pass needs memory, so the rule
first checks the memory limit (``--activation-cap``).
"""

from __future__ import annotations

from megatron.adaptive.schedule import Action, ActionKind, RankState, run_time_rule


@run_time_rule()
def oldest_first(state: RankState) -> Action | None:
    """Returns the action that the rank starts now, or ``None`` to wait for the next message."""
    ready = [action for action in state.ready() if state.fits(action)]
    # Other ranks do not wait for weight gradients. Therefore, compute them only if no other action
    # is ready.
    urgent = [action for action in ready if action.kind is not ActionKind.W]
    return min(
        urgent or ready,
        key=lambda action: (action.microbatch, action.kind is ActionKind.F),
        default=None,
    )
