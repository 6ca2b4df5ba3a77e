"""Reads the variables that a ``conf.sh`` sets, by letting bash run it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from megatron.adaptive.errors import ConfigError, SetupError

__all__ = ["read_variables"]

_LIMIT_S = 20.0
# Prints every variable that the file set as NAME, NUL, VALUE, NUL; arrays with the mark of one.
_SCRIPT = r"""
set -eu
cd -- "$2"
_known=" $(compgen -v | tr '\n' ' ') "
source "$1" >&2 </dev/null
for _name in $(compgen -v); do
  case $_known in *" $_name "*) continue ;; esac
  case $_name in _* | BASH* | FUNCNAME | LINENO | PIPESTATUS | REPLY) continue ;; esac
  _kind=$(declare -p "$_name" 2>/dev/null) || continue
  case $_kind in
    'declare -'[aA]*) printf '%s\0\001array\0' "$_name" ;;
    *) printf '%s\0%s\0' "$_name" "${!_name-}" ;;
  esac
done
"""
_ARRAY = "\001array"
_PLACE = re.compile(r"^(?:environment: )?(?:.*: )?line (\d+): (.*)$")


def read_variables(path: Path) -> dict[str, str]:
    """Run ``path`` with bash, in its own folder and a clean environment, and return what it set.

    Args:
        path: the file.

    Returns:
        Values by name, in the order of names.

    Raises:
        ConfigError: there is no such file, bash cannot run it, or it sets an array.
        SetupError: there is no bash.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no such file"
        raise ConfigError(f"{path}: {what}; copy conf.sh of this project and change it")
    full = path.resolve()
    kept = ("PATH", "HOME", "USER", "TMPDIR", "LANG")
    clean = {name: os.environ[name] for name in kept if name in os.environ}
    try:
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-c", _SCRIPT, "conf", str(full), str(full.parent)],
            env=clean,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise SetupError(f"{path} needs bash to be read, and there is none: install bash") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{path} ran for more than {_LIMIT_S:g} s: it must only set variables"
        ) from None
    if done.returncode:
        raise ConfigError(f"{path}: {_complaint(done.stderr, full, done.returncode)}")
    words = done.stdout.decode(errors="replace").split("\0")[:-1]
    variables = dict(zip(words[::2], words[1::2], strict=True))
    for name, value in variables.items():
        if value == _ARRAY and name.isupper():
            raise ConfigError(
                f"{path}: {name} is an array: write one text in quotes, with spaces between"
            )
    return variables


def _complaint(stderr: bytes, path: Path, status: int) -> str:
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    text = next((line for line in lines if str(path) in line), lines[0] if lines else "")
    text = text.removeprefix("conf: ").removeprefix(f"{path}: ")
    if match := _PLACE.match(text):
        return f"line {match[1]}: {match[2]}; bash cannot run it"
    return f"it ended with status {status}; every command in it must succeed"
