"""Finds the nodes that were slow in a probe, and the speeds that make them usable again.

A slow rank, link or group within a node is the fault of that node. A slow link between two nodes is
the fault of the node with the larger share of slow links::

    a ── b ── c ══ d ══ e      slow: c-d, d-e      d: 2 of 2 links,  c and e: 1 of 2 and 1 of 1

If both nodes have the same share of slow links, or if a group of several nodes is slow, no node is
reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.adaptive.profiling.probe_findings import MEASURES, OF_DEVICE, OF_LINK, Figure, Outlier


@dataclass(frozen=True, kw_only=True)
class FailedNode:
    """Node that was too slow in a probe.

    Attributes:
        node: Name of the node.
        text: Description of the node's worst outlier, with the measured value and the median of
            comparable measurements.
        limits: Minimum value that each quantity must reach before the node is used again, in
            bytes/s, FLOP/s or Hz. Empty if the slow quantity, such as a link's speed, cannot be
            measured by the node alone.
    """

    node: str
    text: str
    limits: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Returns this object as a dict, for the node's entry in ``progress.jsonl``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, entry: Any) -> FailedNode | None:
        """Creates a node from an entry of ``progress.jsonl``.

        Returns ``None`` if the entry is damaged.
        """
        if not isinstance(entry, dict):
            return None
        node = entry.get("node")
        text = entry.get("text")
        limits = entry.get("limits")
        if not isinstance(node, str) or not isinstance(text, str) or not isinstance(limits, dict):
            return None
        is_sound = all(isinstance(limit, int | float) for limit in limits.values())
        if not is_sound or not limits.keys() <= MEASURES.keys():
            return None
        return cls(node=node, text=text, limits=limits)


def find_failed_nodes(
    outliers: Sequence[Outlier], figures: Sequence[Figure], nodes: Sequence[str]
) -> list[FailedNode]:
    """Returns the nodes that caused the outliers of a probe.

    Args:
        outliers: Outliers of the probe.
        figures: All measurements of the probe.
        nodes: Name of the node of each global rank.
    """
    shares = _slow_shares(outliers, figures, nodes)
    by_node: dict[str, list[Outlier]] = {}
    for outlier in outliers:
        node = _at_fault(outlier, shares, nodes)
        if node is not None:
            by_node.setdefault(node, []).append(outlier)
    failed = []
    for node, faults in by_node.items():
        alone = all(outlier.measure in OF_DEVICE for outlier in faults)
        limits = {outlier.measure: _limit(outlier) for outlier in faults} if alone else {}
        failed.append(FailedNode(node=node, text=faults[0].text, limits=limits))
    return failed


def _slow_shares(
    outliers: Sequence[Outlier], figures: Sequence[Figure], nodes: Sequence[str]
) -> dict[str, float]:
    """Returns the fraction of slow links among the links of each node to other nodes.

    ``outliers`` contains the slow links, ``figures`` all measured links, and ``nodes`` the node of
    each rank.
    """

    def links_of(ranks: set[tuple[int, ...]]) -> Counter[str]:
        pairs = ({nodes[rank] for rank in link} for link in ranks)
        return Counter(node for pair in pairs if len(pair) > 1 for node in pair)

    measured = links_of({figure.ranks for figure in figures if figure.measure in OF_LINK})
    slow = links_of({outlier.ranks for outlier in outliers if outlier.measure in OF_LINK})
    return {node: slow[node] / count for node, count in measured.items()}


def _at_fault(outlier: Outlier, shares: Mapping[str, float], nodes: Sequence[str]) -> str | None:
    """Returns the node that caused ``outlier``, or ``None`` if the cause is unknown.

    ``shares`` contains each node's fraction of slow links, and ``nodes`` each rank's node.
    """
    involved = list(dict.fromkeys(nodes[rank] for rank in outlier.ranks))
    if len(involved) == 1:
        return involved[0]
    if outlier.measure not in OF_LINK:
        return None
    worst = max(involved, key=lambda node: shares[node])
    is_clear = all(shares[node] < shares[worst] for node in involved if node != worst)
    return worst if is_clear else None


def _limit(outlier: Outlier) -> float:
    """Returns the minimum acceptable value of the quantity that ``outlier`` measures.

    The unit is bytes/s, FLOP/s or Hz.
    """
    measure = MEASURES[outlier.measure]
    reference = outlier.median / measure.scale
    if outlier.is_against_sheet:
        return measure.least_sheet * reference
    return reference / measure.least_factor
