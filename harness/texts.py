"""Generates text in many scripts, for programs that measure or compare tokenizers."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

from megatron.adaptive.data.corpus import source_files

_SCRIPTS = (
    "aáeéiïoößuü",
    "абвгдеёжз",
    "αβγδεζ",
    "中文字漢語日本",
    "かなカナ",
    "אבגד",
    "مرحبا",
    "हिन्दी",
    "🙂🚀✓—",
)


def mixed_text(megabytes: float) -> list[str]:
    """Returns at least ``megabytes`` MB of text: source files, and random words in many scripts."""
    draw = random.Random(1)
    documents, left = [], megabytes * 1e6
    for path in source_files(Path(sysconfig.get_path("stdlib"))):
        source = path.read_bytes().decode("utf-8", "ignore")
        letters = draw.choice(_SCRIPTS)
        parts = [
            "".join(draw.choices(letters, k=draw.randint(1, 9)))
            + draw.choice((" ", "  ", "\n", "\r\n\t", ", ", "\u00a0", "'s ", f" {draw.random()} "))
            for _ in range(len(source) // 12)
        ]
        documents += [source, "".join(parts)]
        left -= sum(len(text.encode()) for text in documents[-2:])
        if left < 0:
            return documents
    raise SystemExit(f"the standard library contains less than {megabytes} MB of text")
