"""Corrupts checkpoints of the trainer and of a ``Pipeline``, and checks that this is reported.

Checkpoints of several shapes are trained once. Each corruption is made in place, must be found by
the method behind ``checkpoint verify``, and is undone. The trainer and a ``Pipeline``, each in its
own process, load a sample of the corrupt checkpoints and must reject them with the same message. A
load checks blocks while it reads them. It may therefore change some weights before it fails, which
``is_changed`` records.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.gpt_ranks import GptRank
from harness.report import Result, Row, measured
from megatron.adaptive.checkpoint.folder import CheckpointFolder, PipelineFolder, StepFolders
from megatron.adaptive.errors import AdaptiveError
from tests.cluster.jobs import FLAGS, TRAINER
from tests.multiprocess.launch import ROOT, torchrun

KINDS = ("bit", "byte", "zeros", "truncated", "swapped", "missing")
SCRIPT = ROOT / "tests" / "cluster" / "pipeline_script.py"
STEPS, SAMPLES = 4, 4
USED = "used: "
LIMIT_S = 300.0
_ALONE = [*FLAGS, "--train-iters", str(STEPS), "--pipeline-model-parallel-size", "1"]
# The flag pads the vocabulary to the same number of rows in every shape.
_ALONE += ["--make-vocab-size-divisible-by", "32"]
_SHAPES = {
    "trainer-1": (1, ()),
    "trainer-pp2": (2, ("--pipeline-model-parallel-size", "2")),
    "trainer-tp2": (2, ("--tensor-model-parallel-size", "2")),
    "trainer-dp2": (2, ("--ckpt-fully-parallel-save",)),
    "pipeline-1": (1, ()),
    "pipeline-2": (2, ()),
}
"""Maps the name of each job shape to the number of ranks and the flags of the trainer."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Complete checkpoint that is corrupted and verified.

    Attributes:
        folder: Folder of checkpoints.
        step: Step of this checkpoint.
        is_pipeline: Whether a ``Pipeline`` saved it.
    """

    folder: str
    step: int
    is_pipeline: bool

    @property
    def steps(self) -> StepFolders:
        """Returns the folder that contains the checkpoints of all steps."""
        return (PipelineFolder if self.is_pipeline else CheckpointFolder)(self.folder)

    def verify(self) -> str:
        """Verifies this checkpoint as ``checkpoint verify`` does, and returns the report."""
        return "\n".join(self.steps.verify(self.step))


def measure(
    folder: Path,
    damages: int,
    whole: int,
    loads: int,
    seed: int,
    shapes: Sequence[str] = tuple(_SHAPES),
) -> Result:
    """Corrupts checkpoints, verifies all of them, and loads some of them.

    Args:
        folder: Empty folder for checkpoints.
        damages: Number of corruptions.
        whole: Number of undamaged checkpoints that are verified.
        loads: Number of corrupt checkpoints that are also loaded.
        seed: Seed of the first corruption. The following corruptions use the next seeds.
        shapes: Names of the shapes.
    """
    every = make_checkpoints(folder, shapes)
    seeds = range(seed, seed + damages)
    answers: dict[int, tuple[set[str], str]] = {}
    times_s = []
    for number in seeds:
        with damaged(every, number) as (saved, names, description):
            begun_s = time.perf_counter()
            error = saved.verify()
            times_s.append(time.perf_counter() - begun_s)
            answers[number] = names, error
            if not error:
                print(f"not found: {description}")
    alarms = [error for number in range(whole) if (error := every[number % len(every)].verify())]
    loaded = load_damaged(folder, every, random.Random(seed).sample(list(seeds), loads))
    detected = [number for number, (_, error) in answers.items() if error]
    named = [
        number
        for number in detected
        if any(name in answers[number][1] for name in answers[number][0])
    ]
    late = [load for load in loaded if not load["error"] or load["error"].startswith(USED)]
    unlike = [load for load in loaded if bool(load["error"]) != bool(answers[load["seed"]][1])]
    kinds = Counter(KINDS[number % len(KINDS)] for number in set(seeds) - set(detected))
    missed = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
    rows = [
        Row(
            what=f"{damages} randomly damaged checkpoints: damage detected",
            value=100 * len(detected) / damages,
            unit="%",
            goal=100,
            least=True,
            note=f"not found: {missed}" if missed else f"{len(every)} checkpoints of both kinds",
        ),
        Row(
            what="the same: the message states the damaged file",
            value=100 * len(named) / max(1, len(detected)),
            unit="%",
            goal=100,
            least=True,
        ),
        Row(what=f"false alarms in {whole} undamaged checkpoints", value=len(alarms), goal=0),
        Row(
            what=f"{loads} of the damaged ones loaded: used, or results differ from above",
            value=len(late) + len(unlike),
            goal=0,
            note="; ".join(load["error"] or "loaded" for load in (late + unlike)[:1])[:200],
        ),
        measured("time to check a checkpoint", [1e3 * statistics.median(times_s)], unit="ms"),
    ]
    return Result(rows=rows, facts={"damages": {"alarms": alarms, "loaded": loaded}})


def make_checkpoints(folder: Path, shapes: Sequence[str]) -> list[Saved]:
    """Trains a model of each of ``shapes``, and returns two checkpoints of each model.

    The checkpoints are saved in subfolders of ``folder``.
    """
    checkpoints = []
    for name in shapes:
        ranks, flags = _SHAPES[name]
        target, is_pipeline = folder / name, name.startswith("pipeline")
        target.mkdir()
        saved = target / "checkpoints"
        if is_pipeline:
            more = {"folder": str(saved), "save_interval": STEPS // 2, "state": True}
            arguments = [str(STEPS), str(SAMPLES), str(target), json.dumps(more)]
        else:
            arguments = [*_ALONE, *flags, "--save", str(saved), "--save-interval", str(STEPS // 2)]
        script = SCRIPT if is_pipeline else TRAINER
        torchrun(script, arguments, world_size=ranks, log=target / "log.txt", limit_s=LIMIT_S)
        for step in (STEPS // 2, STEPS):
            checkpoints.append(Saved(folder=str(saved), step=step, is_pipeline=is_pipeline))
    return checkpoints


@contextlib.contextmanager
def damaged(every: Sequence[Saved], seed: int) -> Iterator[tuple[Saved, set[str], str]]:
    """Corrupts one of the checkpoints in ``every``, and restores it when the context exits.

    ``seed`` selects the checkpoint and the corruption.

    Yields:
        Tuple of the checkpoint, the names of its corrupt files, and a description of the
        corruption.
    """
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    saved = draw.choice(every)
    steps = saved.steps.steps()
    folder = steps[saved.step]
    files = [file for file in sorted(folder.iterdir()) if file.stat().st_size]
    # For half of the corruptions, all files are equally likely. For the other half, the probability
    # of a file is proportional to its size.
    sizes = [file.stat().st_size for file in files]
    path = draw.choice(files) if draw.random() < 0.5 else draw.choices(files, sizes)[0]
    before, names = {path: path.read_bytes()}, {path.name}
    if kind == "swapped":
        others = [other / path.name for other in steps.values()]
        others = [file for file in [*files, *others] if file.exists()]
        others = [file for file in others if file.read_bytes() != before[path]]
        other = draw.choice(others)
        before[other] = other.read_bytes()
        path.write_bytes(before[other])
        other.write_bytes(before[path])
        names.add(other.name)
        description = f"swapped with {other.parent.name}/{other.name}"
    else:
        description = damage(path, kind, draw)
    try:
        yield saved, names, f"{folder}/{path.name} {description}"
    finally:
        for file, content in before.items():
            file.write_bytes(content)


def damage(path: Path, kind: str, draw: random.Random) -> str:
    """Corrupts the file ``path`` in place.

    Args:
        path: Path of the file, which is not empty.
        kind: Kind of corruption: ``bit``, ``byte``, ``zeros`` (or a different byte if the bytes are
            already zero), ``truncated`` or ``missing``.
        draw: Random number generator.

    Returns:
        Description of the corruption.
    """
    size = path.stat().st_size
    offset = draw.randrange(size)
    if kind == "missing":
        path.unlink()
        return "is missing"
    if kind == "truncated":
        os.truncate(path, offset)
        return f"was cut to {offset} of {size} bytes"
    with path.open("r+b") as file:
        file.seek(offset)
        before = file.read(draw.choice((16, 512, 4096)) if kind == "zeros" else 1)
        if kind == "bit":
            after = bytes([before[0] ^ 1 << draw.randrange(8)])
        elif kind == "zeros" and any(before):
            after = bytes(len(before))
        else:
            after = bytes([before[0] ^ draw.randrange(1, 256)])
        file.seek(offset)
        file.write(after)
    return f"has another {kind} at {offset} of {size} bytes"


def load_damaged(
    folder: Path, every: Sequence[Saved], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Corrupts one checkpoint of ``every`` for each seed in ``seeds``, and tries to load it.

    The trainer and a ``Pipeline`` load their checkpoints in separate processes, which write their
    results to ``folder``. See :func:`damaged` for the corruptions.

    Returns:
        Dict for each load, with ``seed``, ``error`` (empty if the load succeeded) and
        ``is_changed`` (whether a weight changed).
    """
    loads: list[dict[str, Any]] = []
    for is_pipeline in (False, True):
        order_file = folder / f"loads-{is_pipeline}.json"
        numbers = []
        for number in seeds:
            if random.Random(number).choice(every).is_pipeline == is_pipeline:
                numbers.append(number)
        order = {"saved": [asdict(saved) for saved in every], "seeds": numbers}
        order_file.write_text(json.dumps({**order, "is_pipeline": is_pipeline}))
        log = folder / f"loads-{is_pipeline}.txt"
        torchrun(Path(__file__), [str(order_file)], world_size=1, log=log, limit_s=LIMIT_S)
        loads += json.loads(order_file.read_text())
    return loads


def _load_all(path: Path) -> None:
    """Tries to load the corrupt checkpoints that are listed in ``path``.

    Replaces the content of ``path`` with the results.
    """
    from megatron.adaptive import accelerator

    accelerator.install()
    accelerator.quiet_libraries()
    order = json.loads(path.read_text())
    every = [Saved(**checkpoint) for checkpoint in order["saved"]]
    kind = [checkpoint for checkpoint in every if checkpoint.is_pipeline == order["is_pipeline"]]
    loader = _PipelineLoader() if order["is_pipeline"] else _TrainerLoader()
    loader.load(kind[0])
    loads = []
    for number in order["seeds"]:
        with damaged(every, number) as (saved, _, _):
            before, error = loader.weights(), ""
            try:
                loader.load(saved)
            except AdaptiveError as failure:
                error = str(failure)
            # The loader did not detect the damage, and used the corrupt data.
            except Exception as failure:
                error = f"{USED}{type(failure).__name__}: {failure}"
            is_changed = error.startswith(USED) or loader.weights() != before
            loads.append({"seed": number, "error": error, "is_changed": is_changed})
            if is_changed or not error:
                loader.load(kind[0])
    for checkpoint in kind:
        loader.load(checkpoint)
    loader.close()
    path.write_text(json.dumps(loads))


class _TrainerLoader:
    def __init__(self) -> None:
        self._rank = GptRank(_ALONE)
        self.close = self._rank.close

    def load(self, saved: Saved) -> None:
        progress = self._rank.load(ckpt_step=saved.step, load=saved.folder)
        assert progress is not None
        assert progress.iteration == saved.step

    def weights(self) -> int:
        return _sum_of(parameter for chunk in self._rank.chunks for parameter in chunk.parameters())


class _PipelineLoader:
    def __init__(self) -> None:
        import torch

        from megatron.adaptive import Pipeline
        from tests.cluster.pipeline_script import Net, batch_of

        self._pipeline = Pipeline(Net(""), batch_of(0, SAMPLES))
        optimizer = torch.optim.AdamW(self._pipeline.parameters(), lr=1e-2)
        self._pipeline.set_optimizer(optimizer, clip_norm=1.0)
        self._state = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)}

    def load(self, saved: Saved) -> None:
        self._pipeline.load(saved.folder, step=saved.step, state=self._state)

    def weights(self) -> int:
        return _sum_of(self._pipeline.parameters())

    def close(self) -> None:
        self._pipeline.close()


def _sum_of(tensors: Any) -> int:
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.detach().contiguous().numpy().tobytes(), checksum)
    return checksum


if __name__ == "__main__":
    _load_all(Path(sys.argv[1]))
