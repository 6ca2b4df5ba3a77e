"""``flags``: every flag of the trainer by group, as Markdown.

Makes ``docs/flags.md`` from the groups' fields, the same source that the parser is made from.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.adaptive.config.arguments import flag_table
from megatron.adaptive.config.refused import FAMILIES
from megatron.adaptive.errors import ConfigError

_HEAD = """\
# Flags of `pretrain_gpt.py`

Made by `python -m megatron.adaptive flags > docs/flags.md`; change the fields in
`megatron/adaptive/config/`, not this file.

A switch stands without a value; its default is off. Several spellings of one flag are separated
by commas. The flags that Megatron-LM has and this trainer refuses are at the end.
"""


def main(argv: Sequence[str]) -> int:
    """Print the flags to stdout."""
    if "-h" in argv or "--help" in argv:
        print("usage: python -m megatron.adaptive flags > docs/flags.md")
        return 0
    if argv:
        raise ConfigError(f"{argv[0]} is not taken: flags prints all of them; leave it out")
    print(markdown(), end="")
    return 0


def markdown() -> str:
    """Every flag by group and every refused family, as one Markdown text."""
    parts = [_HEAD]
    for title, rows in flag_table().items():
        parts.append(f"\n## {title}\n\n| Flag | Default | Meaning |\n| --- | --- | --- |\n")
        for flag, default, text in rows:
            parts.append(f"| `{_cell(flag)}` | {_cell(default)} | {_cell(text)} |\n")
    parts.append("\n## Refused\n\n| Flags | Why, and what to do |\n| --- | --- |\n")
    for family in FAMILIES:
        names = [f"`--{name}`" for name in family.flags]
        names += [f"`--{prefix}*`" for prefix in family.prefixes]
        parts.append(f"| {', '.join(names)} | {_cell(family.reason)} |\n")
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
