"""Runs ``pretrain_gpt.py`` of an unmodified Megatron-LM with the plugin, and records its results.

Usage: ``user_script.py SCRIPT RESULTS FLAG ...``, as a rank of a job.

The program inserts the lines of docs/plugin.md into the text of ``SCRIPT`` before it runs it:
``install()`` at the top, and ``add_arguments`` as ``extra_args_provider``. The file itself is not
changed. Another line calls :func:`record` before training starts.

After each step and evaluation, a line is added to ``RESULTS.RANK``. It contains all numbers as
hexadecimal floats, and a digest of the weights on the rank.
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import importlib
import json
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any

_EDITS = (
    ("import torch\n", "import megatron.adaptive\nmegatron.adaptive.install()\nimport torch\n"),
    (
        "extra_args_provider=add_modelopt_args if has_nvidia_modelopt else None",
        "extra_args_provider=megatron.adaptive.add_arguments",
    ),
    ('if __name__ == "__main__":\n', '_record()\nif __name__ == "__main__":\n'),
)


def allow_old_python() -> None:
    """Makes Megatron-LM importable with Python 3.11, although releases since 0.17 need 3.12."""
    if not hasattr(typing, "override"):
        vars(typing)["override"] = importlib.import_module("typing_extensions").override


def edited(text: str) -> str:
    """Returns the script ``text`` with the lines of docs/plugin.md inserted."""
    for old, new in _EDITS:
        assert text.count(old) == 1, f"the script must contain exactly once: {old}"
        text = text.replace(old, new)
    return text


def record(results: Path) -> None:
    """Makes Megatron-LM's trainer append the results of each step and evaluation to ``results``."""
    training: Any = sys.modules["megatron.training.training"]

    def note(**values: Any) -> None:
        with results.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def after(name: str, note_of: Any) -> None:
        original = getattr(training, name)

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            outcome = original(*args, **kwargs)
            note_of(outcome, args)
            return outcome

        setattr(training, name, run)

    def note_step(outcome: Any, args: Any) -> None:
        model = args[2]
        note(losses=_numbers(outcome[0]), norm=_number(outcome[5]), weights=_digest(model))

    after("train_step", note_step)
    after("evaluate", lambda outcome, args: note(evaluated=_numbers(outcome[0])))


def _numbers(values: Any) -> dict[str, str]:
    return {name: _number(value) for name, value in (values or {}).items()}


def _number(value: Any) -> str:
    # A pair contains a sum, and the number of tokens that were added up.
    if isinstance(value, list | tuple):
        return " ".join(map(_number, value))
    if hasattr(value, "numel") and value.numel() > 1:
        return " ".join(float(number).hex() for number in value.flatten())
    return "none" if value is None else float(value).hex()


def _digest(chunks: Any) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            digest.update(name.encode())
            digest.update(weight.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    # If a rank hangs, it prints its stack traces and exits, because there may be no other process
    # that stops it.
    faulthandler.dump_traceback_later(float(os.environ["WATCHDOG_S"]), exit=True)
    script, results = Path(sys.argv[1]), Path(sys.argv[2])
    allow_old_python()
    sys.argv = [str(script), *sys.argv[3:]]
    sys.path[0] = str(script.parent)
    program = types.ModuleType("__main__")
    program.__dict__.update(
        __file__=str(script),
        _record=functools.partial(record, Path(f"{results}.{os.environ['RANK']}")),
    )
    sys.modules["__main__"] = program
    exec(compile(edited(script.read_text()), str(script), "exec"), program.__dict__)


if __name__ == "__main__":
    main()
