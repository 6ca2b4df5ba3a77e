"""Who copies what, and whether the memory is there."""

from __future__ import annotations

import dataclasses

from megatron.adaptive.checkpoint.snapshots import Need, RankParts, make_plan, why_not

MIB = 1024**2
WEIGHT, OTHER = ("weight", (0, 0)), ("other", (0,))


def rank(node: str, *parts: str, **changes: object) -> RankParts:
    """A rank of a node, whose buddy is the node ``z``."""
    told = RankParts(
        node=node,
        domain=node,
        buddy="z",
        machine=node,
        available_bytes=1 << 40,
        extra_bytes=100,
        parts={(part, (0,)): MIB for part in parts},
    )
    return dataclasses.replace(told, **changes)  # type: ignore[arg-type]


def test_what_is_on_two_nodes_is_not_sent() -> None:
    told = [rank("a", "x", "y"), rank("b", "y", "w")]
    plan = make_plan(told)
    needs = {part[0]: plan.needs[at] for part, at in plan.need_of.items()}
    assert needs == {
        "x": Need(ranks=(0,), is_sent=True),
        "y": Need(ranks=(0, 1), is_sent=False),
        "w": Need(ranks=(1,), is_sent=True),
    }
    assert plan.sent_bytes == [MIB, MIB]
    assert plan.tensor_bytes == [2 * MIB, 2 * MIB]
    assert plan.copied_by(0, told[0]) == [("x", (0,)), ("y", (0,))]


def test_replicas_on_one_node_share_the_copying() -> None:
    told = [rank("a", "v", "w", "x", "y") for _ in range(2)]
    plan = make_plan(told)
    assert plan.tensor_bytes == [2 * MIB, 2 * MIB] == plan.sent_bytes
    first, second = (set(plan.copied_by(at, one)) for at, one in enumerate(told))
    assert first | second == set(told[0].parts)
    assert not first & second


def test_two_nodes_of_one_machine_do_not_guard_each_other() -> None:
    told = [rank("a", "x", domain="m", machine="m"), rank("b", "x", domain="m", machine="m")]
    (need,) = make_plan(told).needs
    assert need == Need(ranks=(0,), is_sent=True)


def test_alone_nothing_is_sent() -> None:
    told = [rank("a", "x", buddy=None)]
    plan = make_plan(told)
    assert plan.needs == [Need(ranks=(0,), is_sent=False)]
    assert plan.sent_bytes == [0]


def test_memory_counts_for_who_keeps_the_copies() -> None:
    told = [rank("a", "x"), rank("z", "y", buddy="a")]
    plan = make_plan(told)
    assert why_not(plan, told, None) is None
    # Two slots of its own and two of the other's.
    assert why_not(plan, told, 4 * MIB + 4 * 4096) is None
    why = why_not(plan, told, 4 * MIB)
    assert why is not None
    assert "on node a and --replicate-memory lets them take 0.00391 GiB" in why
    short = [told[0], dataclasses.replace(told[1], available_bytes=5 * MIB)]
    why = why_not(plan, short, None)
    assert why is not None
    assert "on the machine of node z, which has 0.00488 GiB left" in why
    # What is enough for one node is not for two on the same machine.
    both = [dataclasses.replace(one, machine="m", available_bytes=8 * MIB) for one in told]
    assert why_not(plan, both, None) is not None
