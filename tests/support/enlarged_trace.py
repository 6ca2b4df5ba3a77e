"""Enlarges synthetic traces: copies replicas and repeats iterations.

Simulating 10,000 ranks or 12,000 iterations takes minutes, but copying text takes seconds. The
hosts of the enlarged run have separate clocks.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from megatron.adaptive.trace.trace_format import COLUMNS, trace_file_name
from tests.support.synthetic_trace import SyntheticRun, write_synthetic

_PEER = COLUMNS.index("peer")
_DURATION = COLUMNS.index("duration_ns")


def write_enlarged(
    folder: Path, run: SyntheticRun, *, replicas: int, repetitions: int = 1, ranks_per_host: int = 8
) -> int:
    """Writes the traces of a run with more replicas and iterations than were simulated.

    The durations of each copied rank are increased by at most 2%.

    Args:
        folder: Folder of the traces.
        run: Run to simulate. Its replicas are copied one after another, repeatedly.
        replicas: Number of replicas of the enlarged run.
        repetitions: Number of times that the simulated iterations are written.
        ranks_per_host: Number of ranks on each host. The ranks of a host share its clock.

    Returns:
        The number of ranks of the enlarged run.
    """
    small = folder.with_name(f"{folder.name}-small")
    write_synthetic(small, run)
    folder.mkdir(parents=True)
    world = run.num_ranks * replicas
    rng = np.random.default_rng(run.seed)
    for rank in range(world):
        pp_rank, dp_rank = divmod(rank, replicas)
        source = pp_rank * run.replicas + dp_rank % run.replicas
        lines = (small / trace_file_name(source)).read_text(encoding="ascii").splitlines()
        header = json.loads(lines[0])
        host = f"host{rank // ranks_per_host}"
        header |= {"rank": rank, "world_size": world, "dp_rank": dp_rank}
        header |= {"host": host, "clock": f"clock of {host}"}
        blocks = _blocks(lines[1:], run.replicas, replicas, dp_rank, float(rng.uniform(1, 1.02)))
        text = [json.dumps(header)]
        for number in range(repetitions):
            for marker, spans in blocks:
                shift = number * len(blocks)
                moved_ns = number * 10**9 * len(blocks)
                begun = {**marker, "begin_iteration": marker["begin_iteration"] + shift}
                begun["start_ns"] += moved_ns
                text += [json.dumps(begun), *spans]
        (folder / trace_file_name(rank)).write_text("\n".join(text) + "\n", encoding="ascii")
    shutil.rmtree(small)
    return world


def _blocks(
    lines: list[str], old: int, new: int, dp_rank: int, factor: float
) -> list[tuple[dict[str, int], list[str]]]:
    """Adapts the trace ``lines`` of a rank to replica ``dp_rank``.

    The number of replicas changes from ``old`` to ``new``, which changes the ranks of peers. The
    durations of passes are multiplied by ``factor``. Returns a pair for each iteration: the object
    in the iteration's first line, and the lines of its spans.
    """
    blocks: list[tuple[dict[str, int], list[str]]] = []
    for line in lines:
        if line.startswith("{"):
            record = json.loads(line)
            if "begin_iteration" in record:
                blocks.append((record, []))
            continue
        row = json.loads(line)
        if row[_PEER] >= 0:
            row[_PEER] = row[_PEER] // old * new + dp_rank
        if row[0] < 3:
            row[_DURATION] = int(row[_DURATION] * factor)
        blocks[-1][1].append(json.dumps(row, separators=(",", ":")))
    for marker, spans in blocks:
        marker["size_bytes"] = sum(len(span) + 1 for span in spans)
    return blocks
