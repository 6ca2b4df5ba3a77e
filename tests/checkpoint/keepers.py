"""Defines a fixture with the snapshot servers of two nodes, and writes snapshots as checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.adaptive.checkpoint import snapshot_restore as restore
from megatron.adaptive.checkpoint.snapshot_keeper import Buddy, SnapshotKeeper
from megatron.adaptive.cluster.snapshot_placement import SnapshotSource, newest


@pytest.fixture
def keepers() -> Iterator[list[SnapshotKeeper]]:
    """Yields the snapshot servers of two nodes. The first one sends snapshots to the second one."""
    pair = [SnapshotKeeper("127.0.0.1") for _ in range(2)]
    buddy = Buddy(name="b", address="127.0.0.1", port=pair[1].port)
    pair[0].prepare("run", "secret", buddy)
    pair[1].prepare("run", "secret", None)
    yield pair
    for keeper in pair:
        keeper.close()


def left_with(*keepers: SnapshotKeeper, within_s: float = 10.0) -> SnapshotSource:
    """Returns the snapshot of the newest step that can be restored from ``keepers``.

    Each keeper gets up to ``within_s`` seconds to finish its transfers.
    """
    kept = [(str(index), keeper.inventory(within_s)) for index, keeper in enumerate(keepers)]
    return newest(kept)


def write_out(source: SnapshotSource, folder: Path, *, is_pipeline: bool = False) -> None:
    """Writes the snapshot ``source`` as a checkpoint to ``folder``, as the nodes of a job do.

    ``is_pipeline`` says whether the snapshot was taken by a ``Pipeline``.
    """
    common = {"checkpoints": str(folder), "is_pipeline": is_pipeline, "step": source.step}
    common["lease"] = 0
    restore._folder(common).begin(source.step)
    order = {**common, "what": "write", "index": 0, "parts": source.parts, "has_common": True}
    assert restore.main([json.dumps(order)]) == 0
    assert restore.main([json.dumps({**common, "what": "assemble", "count": 1})]) == 0
