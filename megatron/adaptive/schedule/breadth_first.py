"""Breadth-first: every microbatch goes through a chunk before the next chunk's turn.

Two ranks, two chunks, three microbatches::

    rank 0 | F0-0 F0-1 F0-2 F1-0 F1-1 F1-2 B1-0 B1-1 B1-2 B0-0 B0-1 B0-2
    rank 1 | F0-0 F0-1 F0-2 F1-0 F1-1 F1-2 B1-0 B1-1 B1-2 B0-0 B0-1 B0-2

A chunk's weights are used in one stretch per direction, so that gathering them and reducing their
gradients is done once a step and hides behind the other chunks. The price is memory: every rank
holds all microbatches. The idle time is that of interleaved 1F1B: without latency a step of m
microbatches, at least as many as ranks, on p ranks with v chunks takes
``(m * v + p - 1) * (t_F + t_B)`` with t_F and t_B the times of one stage.

The order is that of ``gpipe`` with several chunks; here the placement is a loop, as in the paper.
Deviation from the paper: backwards run in ascending microbatch order, as everywhere in this
package.

Source: Breadth-First Pipeline Parallelism, arXiv 2211.05953: its schedule for a
looping placement.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.adaptive.errors import ScheduleError
from megatron.adaptive.schedule import gpipe
from megatron.adaptive.schedule.placement import Placement
from megatron.adaptive.schedule.schedule import Schedule

__all__ = ["make"]


def make(placement: Placement, num_microbatches: int) -> Schedule:
    """Make the breadth-first schedule of a loop placement with at least two chunks per rank.

    Raises:
        ScheduleError: another placement, or no microbatch.
    """
    if placement.num_chunks == 1 or placement.kind != "loop":
        raise ScheduleError(
            f"schedule breadth-first got a {placement.kind} placement with {placement.num_chunks}"
            " chunk(s) per rank: it needs a loop of at least 2, choose gpipe for others"
        )
    return replace(gpipe.make(placement, num_microbatches), name="breadth-first")
