"""Jobs that change their shape when machines come and go.

::

    run ── Manager ─┬─ Agent (node a) ── nursery ─┬─ rank 0
     │              │                             └─ rank 1
     Lease          └─ Agent (node b) ── nursery ─── rank 2
     State

Imports no torch: only the nursery does, once for all processes that it forks.
"""
