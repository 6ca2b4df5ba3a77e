"""Lists the releases of megatron-core that tests use in addition to the installed one."""

from __future__ import annotations

from pathlib import Path

UNPACKED = Path(__file__).resolve().parents[2] / "build/megatron-core"
"""Folder to which ``prerequisite.sh --versions`` unpacks releases of megatron-core."""
FETCHED = ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""Releases of megatron-core that ``prerequisite.sh --versions`` unpacks, and the pinned release."""


def trees_of_others() -> list[str]:
    """Returns the names of megatron-core trees that the user has added, such as a checkout of main.

    A tree named NAME is at ``build/megatron-core/megatron-core==NAME``, which may be a link.
    """
    names = (path.name.partition("==")[2] for path in sorted(UNPACKED.glob("megatron-core==*")))
    return [name for name in names if name not in FETCHED]
