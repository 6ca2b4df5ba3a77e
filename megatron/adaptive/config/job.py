"""What a job that changes its shape tells the script of each rank, in an environment variable.

The trainer has flags for all of it; a script of the user's has flags of its own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from megatron.adaptive.errors import ConfigError

__all__ = ["EXIT_MEASURED", "JOB_VARIABLE", "JobOrder"]

JOB_VARIABLE = "MEGATRON_ADAPTIVE_JOB"
EXIT_MEASURED = 79
"""Status of ranks that have measured their model and wait to be started in a shape for it."""


@dataclass(frozen=True, kw_only=True)
class JobOrder:
    """Where a rank saves and tells how far it is, and its shape.

    Attributes:
        checkpoints: folder of checkpoints, to go on from as well.
        progress: folder of the progress file of this shape.
        model: file of what the job knows of the model.
        epoch: number of the shape.
        signature: of the model and the settings that the shape was planned for; empty where
            nothing is known of them: they are to be measured first.
        pipeline_size: processes of a pipeline.
        replicas: pipelines.
        micro_batch_size: samples of a microbatch.
        partition: segments of each stage.
    """

    checkpoints: str
    progress: str
    model: str
    epoch: int
    signature: str = ""
    pipeline_size: int = 0
    replicas: int = 0
    micro_batch_size: int = 0
    partition: tuple[int, ...] = ()

    def to_text(self) -> str:
        """The value of the variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> JobOrder:
        """Read the value of the variable.

        Raises:
            ConfigError: it was not written by this program.
        """
        try:
            told = json.loads(text)
        except ValueError:
            told = None
        names = {one.name for one in fields(cls)}
        if not isinstance(told, dict) or set(told) != names:
            raise ConfigError(
                f"environment variable {JOB_VARIABLE} is {text[:60]!r}: it is set by python -m"
                " megatron.adaptive run alone; unset it"
            )
        return cls(**{**told, "partition": tuple(told["partition"])})
