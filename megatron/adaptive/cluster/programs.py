"""What the ranks of a job run: the trainer, or a script of the user's with a ``Pipeline``.

=============  ================================  ==========================================
               the trainer                       a script
=============  ================================  ==========================================
is told        flags after the user's own        one environment variable, ``config.job``
checkpoints    ``CheckpointFolder``              ``PipelineFolder``
shape for      its arguments                     what its ranks measured, at the first start
=============  ================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from megatron.adaptive.checkpoint.folder import (
    CheckpointFolder,
    PipelineFolder,
    read_pipeline_manifest,
)
from megatron.adaptive.cluster.job import EpochProgress, job_folder
from megatron.adaptive.cluster.layouts import Shape
from megatron.adaptive.config.job import EXIT_MEASURED, JOB_VARIABLE, JobOrder
from megatron.adaptive.errors import SetupError
from megatron.adaptive.planner.measured_module import MeasuredModule

__all__ = ["Program", "Script", "Start", "Trainer", "is_trainer", "model_file"]

_TRAINER = "pretrain_gpt"
_MODEL = "model.json"
_MOST_MEASURED = 3
# How a run begins that has a checkpoint of another one; not how it goes on from its own.
_FIRST_ONLY = {"--finetune": 0, "--no-load-optim": 0, "--no-load-rng": 0, "--ckpt-step": 1}
_OF_EPOCHS = ("--trace-dir",)


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a program's ranks.

    Attributes:
        shape: of them.
        epoch: its number.
        resumed: the iteration that they go on from, 0 for none.
        progress: folder where they tell how far they are.
    """

    shape: Shape
    epoch: int
    resumed: int
    progress: Path


class Program(Protocol):
    """What the ranks of a job run."""

    @property
    def folder(self) -> CheckpointFolder | PipelineFolder:
        """Of its checkpoints."""

    def latest(self) -> int | None:
        """The iteration to go on from, ``None`` where there is no checkpoint."""

    def check(self) -> None:
        """Refuse a folder of checkpoints that ranks could not go on from.

        Raises:
            CheckpointError: it is damaged.
        """

    def told(self, start: Start) -> tuple[list[str], dict[str, str]]:
        """Arguments and further variables of the ranks of a start."""

    def is_well(self, status: int) -> bool:
        """Whether a rank that ended with a status did so in good order."""

    def goes_on(self, before: EpochProgress, statuses: Iterable[int]) -> str:
        """Why a job goes on whose ranks ended in good order, empty where it need not.

        Args:
            before: what they wrote.
            statuses: that they ended with.

        Raises:
            SetupError: they did not do what a job needs.
        """


class Trainer:
    """The trainer of this project, which has flags for all that a job tells it.

    Args:
        arguments: as the user gave them.
        checkpoints: their folder.

    Attributes:
        folder: of checkpoints.
    """

    def __init__(self, arguments: Sequence[str], checkpoints: Path) -> None:
        self._arguments = arguments
        self.folder = CheckpointFolder(checkpoints)

    def latest(self) -> int | None:
        """See :class:`Program`."""
        return self.folder.latest()

    def check(self) -> None:
        """See :class:`Program`."""
        if (latest := self.latest()) is not None:
            self.folder.open(latest)

    def told(self, start: Start) -> tuple[list[str], dict[str, str]]:
        """See :class:`Program`; later arguments win over the user's."""
        words: list[str] = []
        skip = 0
        for at, word in enumerate(self._arguments):
            name, equals, value = word.partition("=")
            if skip:
                skip -= 1
            elif start.resumed and name in _FIRST_ONLY:
                skip = 0 if equals else _FIRST_ONLY[name]
            else:
                words.append(word)
                if name in _OF_EPOCHS:
                    base = value if equals else self._arguments[at + 1]
                    words += [] if equals else [base]
                    skip = 0 if equals else 1
                    words += [name, f"{base}/epoch-{start.epoch}"]
        checkpoints = str(self.folder.path)
        words += [*start.shape.flags, "--save", checkpoints, "--progress-dir", str(start.progress)]
        if start.resumed:
            words += ["--load", checkpoints]
        return words, {}

    def is_well(self, status: int) -> bool:
        """See :class:`Program`."""
        return status == 0

    def goes_on(self, before: EpochProgress, statuses: Iterable[int]) -> str:
        """See :class:`Program`."""
        return ""


class Script:
    """A script that trains a ``Pipeline`` in ``Pipeline.loop``.

    Args:
        path: of the script.
        arguments: as the user gave them; its own.
        checkpoints: their folder.

    Attributes:
        folder: of checkpoints.
    """

    def __init__(self, path: Path, arguments: Sequence[str], checkpoints: Path) -> None:
        self._name = path.name
        self._arguments = arguments
        self.folder = PipelineFolder(checkpoints)
        self._model = model_file(checkpoints)
        self._measured = 0

    def latest(self) -> int | None:
        """See :class:`Program`."""
        return self.folder.latest()

    def check(self) -> None:
        """See :class:`Program`."""
        if (latest := self.latest()) is not None:
            read_pipeline_manifest(self.folder.find(latest))

    def told(self, start: Start) -> tuple[list[str], dict[str, str]]:
        """See :class:`Program`; what must stay for the losses stays from the first shape on."""
        shape = start.shape
        known = None if shape.is_to_be_measured else MeasuredModule.read(self._model)
        if known is not None and known.is_random and known.micro_batch_size is None:
            # Dropout draws for a microbatch.
            replace(known, micro_batch_size=shape.micro_batch).write(self._model)
        order = JobOrder(
            checkpoints=str(self.folder.path),
            progress=str(start.progress),
            model=str(self._model),
            epoch=start.epoch,
            signature="" if known is None else known.signature,
            pipeline_size=shape.pipeline,
            replicas=shape.data,
            micro_batch_size=shape.micro_batch,
            partition=shape.partition,
        )
        return list(self._arguments), {JOB_VARIABLE: order.to_text()}

    def is_well(self, status: int) -> bool:
        """See :class:`Program`."""
        return status in (0, EXIT_MEASURED)

    def goes_on(self, before: EpochProgress, statuses: Iterable[int]) -> str:
        """See :class:`Program`."""
        if EXIT_MEASURED in statuses:
            self._measured += 1
            if self._measured > _MOST_MEASURED:
                raise SetupError(
                    f"{self._name} gave another model, sample or settings at each of"
                    f" {_MOST_MEASURED} starts: build the same Pipeline at every start"
                )
            return "the model was measured"
        self._measured = 0
        if before.begun_ns is None:
            raise SetupError(
                f"{self._name} ended without training: a job that changes its shape needs a script"
                " that builds a megatron.adaptive.Pipeline and trains in `for step in"
                " pipeline.loop(...)`; see docs/elastic.md"
            )
        return ""


def model_file(checkpoints: Path) -> Path:
    """What a job knows of the model of its script."""
    return job_folder(checkpoints) / _MODEL


def is_trainer(script: Path) -> bool:
    """Whether a script is the trainer, or goes into it: its name or its text says so."""
    if script.stem == _TRAINER:
        return True
    try:
        return _TRAINER in script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # who runs it will say what is wrong
