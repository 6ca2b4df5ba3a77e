"""The whole trainer in two ranks, on a GPU where there is one: what runs beside the steps.

Checkpoints are written while training goes on, the run is traced, processes read the data ahead,
and tensors go through shared memory, all at once; then the run goes on from a checkpoint, and ends
when a rank is killed.
"""

from __future__ import annotations

import re
import signal
from functools import partial
from pathlib import Path

import pytest

from megatron.adaptive.trace.read import read_run
from tests.multiprocess.launch import ROOT, SMALL_GPT, Ranks, has_ended, tail, torchrun, wait_until

from .device import needs_extension

pytestmark = [needs_extension, pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(250)]

LIMIT_S = 100.0
ITERATIONS, SAVED = 6, 3
FLAGS = (
    f"{SMALL_GPT} --num-layers 4 --pipeline-model-parallel-size 2 --pipeline-schedule adaptive"
    " --mock-data --log-interval 1 --use-cpu-initialization --transport shm --num-workers 2"
)


def flags(more: str) -> list[str]:
    return [*FLAGS.split(), *more.split()]


def losses(log: Path) -> dict[int, float]:
    """Returns the losses of a log by iteration."""
    found = re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", log.read_text(errors="replace"))
    return {int(iteration): float(loss) for iteration, loss in found}


def test_a_traced_run_saves_beside_its_steps_and_goes_on(tmp_path: Path) -> None:
    """Processes that read data were used on GPUs alone, beside threads and channels, untested."""
    whole, resumed = tmp_path / "whole.txt", tmp_path / "resumed.txt"
    common = f"--train-iters {ITERATIONS}"
    saving = f"{common} --save saved --save-interval {SAVED} --async-save --trace-dir traces"
    script = ROOT / "pretrain_gpt.py"
    torchrun(script, flags(saving), world_size=2, log=whole, limit_s=LIMIT_S)
    expected = losses(whole)
    assert sorted(expected) == [*range(1, ITERATIONS + 1)]
    run = read_run(tmp_path / "traces")
    assert run.complete_iterations() == (*range(1, ITERATIONS + 1),)
    for trace in run.ranks.values():
        table = trace.table([2])
        for kind in ("F", "B", "optimizer", "step"):
            assert table.where(kind).any(), kind
    loading = f"{common} --load saved --ckpt-step {SAVED}"
    torchrun(script, flags(loading), world_size=2, log=resumed, limit_s=LIMIT_S)
    later = {number: loss for number, loss in expected.items() if number > SAVED}
    assert losses(resumed) == pytest.approx(later, rel=1e-4)


def test_a_killed_rank_ends_the_other_which_names_it(tmp_path: Path) -> None:
    """A process that reads data for the killed rank keeps none of its connections open."""
    log = tmp_path / "output.txt"
    words = [str(ROOT / "pretrain_gpt.py"), *flags("--train-iters 100000 --num-workers 1")]
    ranks = Ranks(words, world_size=2, log=log, limit_s=LIMIT_S)
    try:
        wait_until(lambda: len(losses(log)) >= 3, lambda: tail(log), LIMIT_S)
        first, second = ranks.processes()
        readers = first.children(recursive=True)
        first.send_signal(signal.SIGKILL)
        # Its own status, and that of the rank that waits for it.
        ended = ranks.server.wait(ranks.keys[1:], LIMIT_S)
        assert ended == {ranks.keys[1]: 2}, tail(log)
        for process in (second, *readers):
            wait_until(partial(has_ended, process), partial(str, process), LIMIT_S)
    finally:
        ranks.kill()
    said = [line for line in log.read_text().splitlines() if "error: " in line]
    assert len(said) == 1, said
    assert "rank 0" in said[0]
