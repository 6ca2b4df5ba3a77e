"""Tests that ``--trace-detail collectives`` records how long ranks wait for the slowest rank."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cli import trace
from megatron.adaptive.trace.collectives import JoinedCollectives, join_collectives
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.views.perfetto import perfetto_events
from tests.trace.views.event_rules import broken_rules

from .launch import ROOT, Ranks, tail

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

SLOW_RANK = 1
DELAY_S = 0.05
LAYERS = 2
MICROBATCHES = 2
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 1 --lr 1e-4 --mock-data --vocab-size 127"
    f" --tokenizer-type NullTokenizer --global-batch-size {2 * MICROBATCHES} --train-iters 3"
    " --eval-iters 0 --log-interval 1 --tensor-model-parallel-size 2"
    " --use-distributed-optimizer"
).split()
# The script runs the trainer with a rank that is late for the collective after each MLP.
SCRIPT = f"""
import os, runpy, time
from megatron.core.transformer.mlp import MLP

if os.environ["RANK"] == "{SLOW_RANK}":
    forward = MLP.forward

    def late(*arguments, **options):
        time.sleep({DELAY_S})
        return forward(*arguments, **options)

    MLP.forward = late
runpy.run_path({str(ROOT / "pretrain_gpt.py")!r}, run_name="__main__")
"""
LIMIT_S = 200.0


def nested_names(events: list[dict[str, Any]], rank: int) -> set[tuple[str, ...]]:
    """Returns the names of compute slices of ``rank`` in ``events``, with those of their parents.

    Each element is a tuple that begins with the outermost parent, and ends with the slice.
    """
    (thread,) = (
        (event["pid"], event["tid"])
        for event in events
        if (event["pid"], event["name"], event["args"].get("name"))
        == (rank + 1, "thread_name", "compute")
    )
    around: list[tuple[float, str]] = []
    names = set()
    for event in events:
        if event["ph"] != "X" or (event["pid"], event["tid"]) != thread:
            continue
        while around and around[-1][0] <= event["ts"]:
            around.pop()
        around.append((event["ts"] + event["dur"], event["name"]))
        names.add(tuple(name for _, name in around))
    return names


def losses(folder: Path, *flags: str) -> list[str]:
    """Trains with ``flags`` on four ranks in ``folder``, and returns losses and gradient norms."""
    folder.mkdir()
    log = folder / "output.txt"
    script = folder / "pretrain_gpt.py"
    script.write_text(SCRIPT)
    command = [str(script), *FLAGS, "--trace-dir", "traces", *flags]
    ranks = Ranks(command, world_size=4, log=log, limit_s=LIMIT_S)
    try:
        assert ranks.wait(LIMIT_S) == [0, 0, 0, 0], tail(log)
    finally:
        ranks.kill()
    return re.findall(r"lm loss: (\S+).*grad norm: (\S+)", log.read_text())


def of_group(run: RunTrace, name: str, ranks: tuple[int, ...]) -> JoinedCollectives:
    """Returns the collectives ``name`` of the group ``ranks`` in the last iteration of ``run``."""
    (joined,) = (
        joined
        for joined in join_collectives(run, [3])
        if joined.name == name and joined.ranks == ranks
    )
    return joined


@pytest.mark.long
def test_ranks_wait_for_the_slow_member(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = losses(tmp_path / "plain")
    assert len(plain) == 3
    assert losses(tmp_path / "measured", "--trace-detail", "collectives") == plain
    assert join_collectives(read_run(tmp_path / "plain" / "traces"), [3]) == []

    folder = tmp_path / "measured" / "traces"
    run = read_run(folder)
    slow = of_group(run, "tensor all-reduce", (0, 1))
    other = of_group(run, "tensor all-reduce", (2, 3))
    # Each layer has two all-reduces in the forward pass and two in the backward pass. The loss and
    # the embedding have additional all-reduces.
    assert slow.per_step == other.per_step >= 4 * LAYERS * MICROBATCHES
    # The last member that starts a collective must not wait.
    assert (slow.wait_ns.min(axis=1) == 0).all()
    # Other programs also delay ranks, so require only that some of the added delays are visible.
    is_late = slow.held_up_ns[:, SLOW_RANK] > 0.8e9 * DELAY_S
    assert is_late.sum() >= 2
    assert (slow.wait_ns[is_late, 0] > 0.8e9 * DELAY_S).all()
    kinds = {joined.name for joined in join_collectives(run, [3])}
    assert {"data and context reduce-scatter", "data and context all-gather"} <= kinds

    events = list(perfetto_events(run, [2, 3]))
    assert broken_rules(events) == []
    names = nested_names(events, 0)
    reduced = ("layer 1", "tensor all-reduce")
    assert ("forward 0-0", *reduced, "transfer") in names
    assert ("backward 0-0", *reduced, "transfer") in names
    assert any(name[-2:] == ("tensor all-reduce", f"wait for rank {SLOW_RANK}") for name in names)
    assert ("reduce", "data and context reduce-scatter", "transfer") in names

    page = ["--format", "html", "--output-dir", str(tmp_path)]
    assert trace.main([str(folder), *page]) == 0
    table = capsys.readouterr().out
    time = r"\d+\.\d\d ms"
    row = rf"^tensor all-reduce +2 +\S+ +\S+ KiB +{time} +{time} +\d+\.\d% +[0-3]: {time}$"
    assert re.search(row, table, re.MULTILINE), table
    assert trace.main([str(folder), *page, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in report["collectives"]} >= {"tensor", "data and context"}
