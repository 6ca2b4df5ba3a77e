"""Defines every exception that this package raises on purpose.

::

    AdaptiveError
    ├── ConfigError          a flag, file or combination of settings breaks a rule
    ├── SetupError           the machine lacks something (device, port, permission, package)
    ├── DataError            corpus, vocabulary or indexed dataset is missing, broken or foreign
    ├── CheckpointError      a checkpoint is missing, incomplete, newer or of another model
    │   └── DamagedCheckpointError   its content differs from what was written
    ├── ScheduleError        a schedule or a policy breaks the rules of the pipeline
    ├── TraceError           trace files are missing, mixed or of a newer format
    ├── DeviceMemoryError    the accelerator ran out of memory
    └── TransportError       a channel between two ranks failed
        ├── PeerLostError    the process at the other end is gone
        └── DeadlineError    nothing arrived within the time limit

A message is one line: what was given, which rule it breaks, what to change. Errors of a
distributed run also carry rank, peer, stage, microbatch, elapsed time and limit. Command line
programs print such an error on one line and exit with status 2; anything else is a bug and keeps
its traceback.
"""

from __future__ import annotations


class AdaptiveError(Exception):
    """Base of all expected errors; its text is one complete line for the user."""


class ConfigError(AdaptiveError):
    """A flag, a file or a combination of settings breaks a rule."""


class SetupError(AdaptiveError):
    """The machine lacks something the run needs."""


class DataError(AdaptiveError):
    """A corpus, vocabulary or indexed dataset is missing, broken or does not fit."""


class CheckpointError(AdaptiveError):
    """A checkpoint is missing, incomplete, of a newer format or of another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is damaged or incomplete; another checkpoint of the run may be intact."""


class ScheduleError(AdaptiveError):
    """A schedule or a policy breaks the rules of the pipeline."""


class TraceError(AdaptiveError):
    """Trace files are missing, mixed, truncated beyond use or of a newer format."""


class DeviceMemoryError(AdaptiveError):
    """The accelerator ran out of memory."""


class TransportError(AdaptiveError):
    """A channel between two ranks failed."""


class PeerLostError(TransportError):
    """The process at the other end of a channel is gone."""


class DeadlineError(TransportError):
    """A wait passed its time limit."""
