"""Tests the traces of pipelines whose segments move between ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.adaptive import __main__ as program
from megatron.adaptive.config.schedule import format_partition
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.whatif.answers import what_if

from ..multiprocess.launch import run_ranks, tail

WORKER = Path(__file__).with_name("traced_worker.py")
LIMIT_S = 200.0


def run(folder: Path, name: str, ranks: int) -> str:
    """Runs the program ``name`` of the worker on ``ranks`` ranks, and returns its output."""
    log = folder / "log"
    status = run_ranks([str(WORKER), str(folder), name], world_size=ranks, log=log, limit_s=LIMIT_S)
    assert status == 0, tail(log)
    return log.read_text()


def timed_segments(trace: RunTrace, rank: int) -> set[int]:
    """Returns the segments for which ``rank`` has recorded times."""
    of_rank = trace.ranks[rank]
    return {row[0] for iteration in of_rank.iterations for row in of_rank.layers(iteration)}


@pytest.mark.multiprocess
def test_each_partition_has_a_trace_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that each partition has a separate folder with a correct trace."""
    output = run(tmp_path, "moves", 2)
    used, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert used == other
    partitions = [tuple(partition) for partition in used]
    changes = [n for n in range(1, len(used)) if used[n] != used[n - 1]]
    assert changes
    begins, ends = [0, *changes], [*changes, len(used)]
    # The newest trace has the requested name, and earlier traces are renamed in order.
    folders = [tmp_path / f"traces-{n + 1}" for n in range(len(changes))] + [tmp_path / "traces"]
    assert sorted(path.name for path in tmp_path.glob("traces*")) == sorted(
        path.name for path in folders
    )
    for folder, begin, end in zip(folders, begins, ends, strict=True):
        trace = read_run(folder)
        partition = partitions[begin]
        cuts = np.cumsum([0, *partition])
        for rank, of_rank in trace.ranks.items():
            assert of_rank.header.layers == partition
            assert list(of_rank.iterations) == list(range(begin + 1, end + 1))
            assert timed_segments(trace, rank) == set(range(cuts[rank], cuts[rank + 1]))
        if end - begin < 3:
            continue
        answer = what_if(trace)
        named = [repair for repair in answer.repairs if "partition " in repair.description]
        if begin == 0:
            assert any(f"instead of {format_partition(partition)}" in r.description for r in named)
        monkeypatch.setattr("sys.argv", ["megatron.adaptive", "trace", str(folder)])
        assert program.main() == 0
        page = capsys.readouterr().out
        table = page[page.index("layer ") :].splitlines()[1 : 1 + sum(partition)]
        rows = [line.split() for line in table]
        owners = [rank for rank, size in enumerate(partition) for _ in range(size)]
        assert [row[:2] for row in rows] == [[str(n), str(rank)] for n, rank in enumerate(owners)]
    assert "Traceback" not in output
