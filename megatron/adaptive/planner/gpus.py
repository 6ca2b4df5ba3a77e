"""The table of common GPUs: memory, bandwidth and arithmetic as their vendors state them.

The figures are data, in ``data/gpus.json``, each row with its source. They serve where nothing was
measured; what a cluster file or a profile says goes before.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from megatron.adaptive.errors import ConfigError

__all__ = ["Gpu", "find_gpu", "gpu_names", "known_gpu"]

_NOISE = re.compile(r"nvidia|geforce|tesla|quadro|[^a-z0-9]+")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One part as its data sheet describes it.

    Attributes:
        name: as cluster files write it.
        memory_bytes: size on the data sheet, 10^9 bytes to the GB.
        memory_bytes_per_s: bandwidth of its memory.
        flops: dense peak of matrix products by element type (``bf16``, ``fp16``, ``tf32``,
            ``fp32``), operations per second; types that it lacks are missing.
        source: the document.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops: Mapping[str, float]
    source: str

    def peak(self, precision: str) -> float:
        """Operations per second of matrix products.

        Args:
            precision: ``fp32``, ``fp16`` or ``bf16``.

        Raises:
            ConfigError: the part has no such arithmetic.
        """
        if precision not in self.flops:
            types = ", ".join(kind for kind in self.flops if kind != "tf32")
            raise ConfigError(
                f"GPU {self.name} does not compute in {precision}, only in {types}: train with"
                f" --{next(iter(self.flops))}, or leave its nodes out"
            )
        return self.flops[precision]


@functools.cache
def _table() -> tuple[Mapping[str, Gpu], Mapping[str, str]]:
    """The parts by name, and the name for every way to write it."""
    file = resources.files("megatron.adaptive.planner") / "data" / "gpus.json"
    parts, names = {}, {}
    for row in json.loads(file.read_text(encoding="utf-8"))["gpus"]:
        aliases = row.pop("aliases")
        gpu = Gpu(**row)
        parts[gpu.name] = gpu
        for alias in (gpu.name, *aliases):
            names[_plain(alias)] = gpu.name
    return parts, names


def _plain(name: str) -> str:
    return _NOISE.sub("", name.lower())


def gpu_names() -> tuple[str, ...]:
    """Names of the parts in the table."""
    return tuple(_table()[0])


def known_gpu(name: str) -> Gpu | None:
    """Return a part by its name, as written in cluster files or as drivers tell it, or ``None``."""
    parts, names = _table()
    found = names.get(_plain(name))
    return None if found is None else parts[found]


def find_gpu(name: str, where: str) -> Gpu:
    """Return a part by its name.

    Args:
        name: case, spaces and the vendor's name do not matter.
        where: what names it, for the message.

    Raises:
        ConfigError: the table has no such part.
    """
    found = known_gpu(name)
    if found is None:
        nearest = difflib.get_close_matches(name.lower(), gpu_names(), n=1, cutoff=0.4)
        hint = f"the nearest is {nearest[0]}" if nearest else f"names are {', '.join(gpu_names())}"
        raise ConfigError(
            f"{where}: GPU {name!r} is neither in the profile nor in the table of GPUs: {hint};"
            " or measure it with python -m megatron.adaptive profile"
        )
    return found
