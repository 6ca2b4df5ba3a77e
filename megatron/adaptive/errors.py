"""Defines the hierarchy of the exceptions that this package raises.

::

    AdaptiveError
    ├── ConfigError          a flag, a file or a combination of settings is invalid
    ├── SetupError           the machine lacks something (device, port, permission, package)
    ├── DataError            corpus, vocabulary or token files are missing, broken or mismatched
    ├── CheckpointError      a checkpoint is missing, incomplete, too new or of another model
    │   └── DamagedCheckpointError   a checkpoint is damaged or incomplete
    ├── ScheduleError        a pipeline schedule is invalid (for example, it would deadlock)
    ├── TraceError           trace files are missing, from several runs or too new
    ├── DeviceMemoryError    the accelerator ran out of memory
    └── TransportError       a channel between two ranks failed
        ├── PeerLostError    the process at the other end has exited or cannot be reached
        └── DeadlineError    nothing arrived within the timeout

A message is a single line that states what the user specified, what is wrong with it, and what to
change. Messages from a distributed run also state the rank, peer, stage, microbatch, elapsed time
and timeout, if they apply. Command-line programs print such an error on one line and exit with
status 2. Any other exception is a bug, so its traceback is printed. A module may define its own
subclasses.
"""

from __future__ import annotations


class AdaptiveError(Exception):
    """Base class of all expected errors. The message is one complete line for the user."""


class ConfigError(AdaptiveError):
    """A flag, a file or a combination of settings is invalid."""


class SetupError(AdaptiveError):
    """The machine lacks something that the run needs: a device, port, permission or package."""


class DataError(AdaptiveError):
    """A corpus, vocabulary or token file is missing or damaged, or does not match related files."""


class CheckpointError(AdaptiveError):
    """A checkpoint is missing, incomplete, of a newer format or of another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is damaged or incomplete. Other checkpoints of the run may be intact."""


class ScheduleError(AdaptiveError):
    """A pipeline schedule is invalid, or a rule chose an action that cannot start yet."""


class TraceError(AdaptiveError):
    """Trace files are missing or truncated, belong to several runs, or use a newer format."""


class DeviceMemoryError(AdaptiveError):
    """The GPU (or other compute device) ran out of memory."""


class TransportError(AdaptiveError):
    """A communication channel between two ranks failed."""


class PeerLostError(TransportError):
    """The process at the other end of a channel has exited or cannot be reached."""


class DeadlineError(TransportError):
    """An expected message or event did not arrive within the timeout."""
