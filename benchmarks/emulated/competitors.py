"""Defines the competitors. Each combines a schedule or rule, a runtime, and a memory limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.adaptive.schedule.catalog import make_policies
from megatron.adaptive.schedule.memory_caps import default_cap
from megatron.adaptive.schedule.policy import Policy
from megatron.adaptive.schedule.stage_placement import Placement, PlacementKind

Engine = Literal["megatron", "torch", "ours", "plug-in"]


@dataclass(frozen=True, kw_only=True)
class Competitor:
    """Combination of schedule, runtime and memory limit. Each has a row in the table.

    Attributes:
        name: Title of the row.
        engine: Runtime of the competitor: ``megatron`` for megatron-core, ``torch`` for
            ``torch.distributed.pipelining``, ``ours`` for the executor of this project, or
            ``plug-in`` for a Megatron-LM step that the plug-in runs.
        schedule: Name of the schedule in the runtime.
        num_chunks: Number of chunks per rank, 1 or 2.
        kind: Placement of the stages.
        weight_pieces: Number of W actions into which each weight gradient is split. If it is 0,
            backward passes are not split into B and W.
        cap: Memory limit of a rank, as a number of activations divided by the number of pipeline
            ranks. The activations of one microbatch on a whole rank count as 1. ``None`` stands for
            the default of the schedule. Only run-time rules of this project have a limit.
        is_policy: Whether the order of actions is chosen at run time.
    """

    name: str
    engine: Engine
    schedule: str
    num_chunks: int = 1
    kind: PlacementKind = "loop"
    weight_pieces: int = 0
    cap: float | None = None
    is_policy: bool = False

    def placement(self, num_ranks: int) -> Placement:
        """Returns the placement of the stages on ``num_ranks`` ranks."""
        return Placement(num_ranks=num_ranks, num_chunks=self.num_chunks, kind=self.kind)

    def cap_for(self, num_ranks: int, num_microbatches: int) -> float | None:
        """Returns the memory limit in microbatches of a whole rank, or ``None`` for a fixed order.

        The pipeline has ``num_ranks`` ranks, and a step has ``num_microbatches`` microbatches.
        """
        if not self.is_policy:
            return None
        if self.cap is None:
            return default_cap(self.placement(num_ranks), num_microbatches)
        return self.cap * num_ranks

    def policies(self, num_ranks: int, num_microbatches: int) -> tuple[Policy, ...]:
        """Returns a policy for each of ``num_ranks`` ranks.

        The policies choose actions in this project's executor and simulator.

        A step has ``num_microbatches`` microbatches.
        """
        return make_policies(
            self.schedule,
            self.placement(num_ranks),
            num_microbatches,
            cap=self.cap_for(num_ranks, num_microbatches),
            weight_pieces=self.weight_pieces,
        )


def _ours(name: str, schedule: str, **options: Any) -> Competitor:
    return Competitor(name=name, engine="ours", schedule=schedule, **options)


_LOOP: dict[str, Any] = {"num_chunks": 2}
_V: dict[str, Any] = {"num_chunks": 2, "kind": "v", "weight_pieces": 1}
_RULE: dict[str, Any] = {"is_policy": True}
# A rule may split weight gradients into any number of pieces. An emulated rank has to sleep once
# for each piece, so use only two.
_V_RULE: dict[str, Any] = {**_V, **_RULE, "weight_pieces": 2}

BASELINE = "megatron 1f1b"
"""Competitor with which the speed of all other competitors is compared."""
INTERLEAVED = "megatron interleaved"
ADAPTIVE = "adaptive, V"
"""Competitor to which the speed goals of rules apply."""
TIGHT = "hinted, V, memory p"
"""Competitor whose memory limit equals the memory that 1F1B needs."""
PLUG_IN = "plug-in: adaptive, V"

COMPETITORS: dict[str, Competitor] = {
    competitor.name: competitor
    for competitor in (
        Competitor(name=BASELINE, engine="megatron", schedule="1f1b"),
        Competitor(name=INTERLEAVED, engine="megatron", schedule="interleaved", **_LOOP),
        Competitor(name="torch 1f1b", engine="torch", schedule="1f1b"),
        Competitor(name="torch interleaved", engine="torch", schedule="interleaved", **_LOOP),
        Competitor(
            name="torch interleaved zb",
            engine="torch",
            schedule="interleaved-zb",
            weight_pieces=1,
            **_LOOP,
        ),
        Competitor(name="torch zb-v", engine="torch", schedule="zb-v", **_V),
        _ours("1f1b", "1f1b"),
        _ours("interleaved", "interleaved", **_LOOP),
        _ours("breadth-first", "breadth-first", **_LOOP),
        _ours("zb-h1", "zb-h1", weight_pieces=1),
        _ours("zb-v", "zb-v", **_V),
        _ours("v-half", "v-half", **_V),
        _ours("varuna", "varuna"),
        _ours("dfc, loop", "dfc", **_LOOP, **_RULE),
        _ours("bfc, loop", "bfc", **_LOOP, **_RULE),
        _ours("adaptive, 1 chunk", "adaptive", **_RULE),
        _ours("adaptive, loop", "adaptive", **_LOOP, **_RULE),
        _ours("adaptive, loop, split", "adaptive", weight_pieces=1, **_LOOP, **_RULE),
        _ours(ADAPTIVE, "adaptive", **_V_RULE),
        _ours("adaptive, V, memory p", "adaptive", cap=1.0, **_V_RULE),
        Competitor(name=PLUG_IN, engine="plug-in", schedule="adaptive", **_V_RULE),
        _ours("hinted, V", "hinted", **_V_RULE),
        _ours(TIGHT, "hinted", cap=1.0, **_V_RULE),
    )
}
QUICK = (BASELINE, INTERLEAVED, "torch zb-v", "zb-v", ADAPTIVE, TIGHT, PLUG_IN)
"""Names of the competitors that run with ``--quick``."""
USUAL = (*QUICK, "1f1b", "interleaved", "adaptive, loop", "adaptive, V, memory p")
"""Names of the competitors that run without ``--quick``."""
