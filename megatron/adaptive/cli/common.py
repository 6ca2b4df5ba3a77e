"""Runs command-line programs, and reports expected errors in a uniform way."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from megatron.adaptive.config.environment import Environment, too_many_files
from megatron.adaptive.config.input_files import printable, say
from megatron.adaptive.errors import AdaptiveError

EXIT_EXPECTED_ERROR = 2
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path of the file in which torchrun expects a rank's error."""
_PRINTED = "printed"
_STOPPED = "stopped by the user"


def show(text: str = "", *, file: TextIO | None = None) -> None:
    """Prints ``text`` with control characters escaped, because it may contain file contents."""
    print(printable(text, lines=True), file=file, flush=True)


def trainer_options() -> list[str]:
    """Returns all spellings of the trainer's options."""
    # Import the definitions of all options only when needed, because the import takes time.
    from megatron.adaptive.config.trainer import flag_specs

    return [name for spec in flag_specs().values() for name in spec.names]


def leave_reason(text: str) -> None:
    """Records in torchrun's error file that this rank has already printed why it exits.

    torchrun prints ``text`` in its list of failed ranks. ``job launch`` then prints no further
    message.
    """
    path = os.environ.get(_ERROR_FILE)
    if path:
        content = {"message": text, "timestamp": int(time.time()), _PRINTED: True}
        # If writing the file fails, the only effect is that the launcher prints a redundant line.
        with contextlib.suppress(OSError):
            written = Path(f"{path}.part")
            written.write_text(json.dumps(content), encoding="utf-8")
            written.replace(path)


def has_left_reason(failure: Any) -> bool:
    """Returns whether the rank in ``failure`` called :func:`leave_reason` before it failed."""
    return bool(failure.error_file_data.get(_PRINTED))


def open_streams() -> None:
    """Opens ``/dev/null`` for each standard stream that was closed when the process started.

    Otherwise, Python would set a closed stream to ``None``, and the next file that is opened might
    get the stream's file descriptor, such as 2. Libraries would then write error messages into
    that file.
    """
    for number, (name, flags) in enumerate(_STREAMS.items()):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, flags)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "r" if flags == os.O_RDONLY else "w"
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


_STREAMS = {"stdin": os.O_RDONLY, "stdout": os.O_WRONLY, "stderr": os.O_WRONLY}


def expected(error: Exception) -> AdaptiveError | None:
    """Returns ``error`` as an ``AdaptiveError``, or ``None`` if ``error`` indicates a bug."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            return too_many_files(str(cause.strerror))
        cause = cause.__cause__
    return error if isinstance(error, AdaptiveError) else _lost_peer(error)


def _lost_peer(error: Exception) -> AdaptiveError | None:
    """Converts a library's error about a broken connection into an error about a lost rank.

    Returns ``None`` if ``error`` is a different error.

    Before a rank starts watching its peers, such an error is the only sign that another rank has
    exited.
    """
    if "torch.distributed" not in sys.modules:
        return None
    # Import this function only here, because its module imports torch, which takes seconds. Most
    # commands do not need torch.
    from megatron.adaptive.engine.process_context import lost_peer

    return lost_peer(error, Environment.read().rank)


def end_at_once(number: int, frame: object) -> None:
    """Handles the signal ``number`` by printing a line and exiting without cleaning up."""
    name = signal.Signals(number).name
    text = _STOPPED if number == signal.SIGINT else f"stopped by signal {name}"
    with contextlib.suppress(OSError):  # Writing fails if the terminal is closed.
        os.write(2, text.encode() + b"\n")
    os._exit(128 + number)


@contextlib.contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """Prints a line and exits if Ctrl-C, SIGTERM or SIGHUP arrives during a ``with`` block.

    Use this context manager around imports, because an interrupt during an import may be reported
    as a different error. Signals that are ignored stay ignored.
    """
    former = from_now_end_at_once()
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def from_now_end_at_once() -> dict[signal.Signals, Any]:
    """Makes the process print a line and exit when Ctrl-C, SIGTERM or SIGHUP arrives.

    Signals that are ignored stay ignored.

    Returns:
        Previous handler of each signal whose handler has changed.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    former = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number in numbers if former[number] not in (signal.SIG_IGN, None)]
    for number in handled:
        signal.signal(number, end_at_once)
    return {number: former[number] for number in handled}


def run_cli(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Runs ``main(argv)``, and prints an expected error as one line on stderr.

    Unexpected exceptions are bugs. They are not caught, so that Python prints a traceback.

    Args:
        main: Function to run. It takes the arguments without the program's name, and returns the
            exit status (``None`` means 0).
        argv: Arguments for ``main``; ``sys.argv[1:]`` by default.

    Returns:
        Exit status: the result of ``main``, 2 after an :class:`AdaptiveError`, 130 after Ctrl-C, or
        141 if the program that reads the output, such as ``head``, has closed the pipe.
    """
    open_streams()
    try:
        status = main(list(sys.argv[1:] if argv is None else argv)) or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(_STOPPED, file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:
        # Python flushes buffered output again at exit. Redirect stdout to make this flush succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        expected_error = expected(error)
        if expected_error is None:
            raise
        say(f"error: {expected_error}")
        return EXIT_EXPECTED_ERROR
