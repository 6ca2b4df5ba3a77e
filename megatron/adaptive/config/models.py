"""Models by name: the trainer's flags that give a GPT its shape."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping
from pathlib import Path

from megatron.adaptive.errors import ConfigError

__all__ = ["MODELS", "model_flags"]


def _shape(layers: int, hidden: int, heads: int, length: int, more: str = "") -> str:
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--seq-length {length} --max-position-embeddings {length} {more}"
    )


_LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --use-rotary-position-embeddings "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
_LLAMA_3 = f"{_LLAMA} --group-query-attention --num-query-groups 8 --rotary-base 500000"
_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"

MODELS: Mapping[str, str] = {
    "tiny": _shape(4, 64, 4, 64, _NO_DROPOUT),
    "small": _shape(8, 128, 4, 128, _NO_DROPOUT),
    "gpt-125m": _shape(12, 768, 12, 1024),
    "gpt-345m": _shape(24, 1024, 16, 1024),
    "gpt-760m": _shape(24, 1536, 16, 1024),
    "gpt-1.3b": _shape(24, 2048, 32, 2048),
    "gpt-1.5b": _shape(48, 1600, 25, 1024),
    "gpt-2.7b": _shape(32, 2560, 32, 2048),
    "gpt-6.7b": _shape(32, 4096, 32, 2048),
    "gpt-13b": _shape(40, 5120, 40, 2048),
    "gpt2": _shape(12, 768, 12, 1024),
    "gpt2-medium": _shape(24, 1024, 16, 1024),
    "gpt2-345m": _shape(24, 1024, 16, 1024),
    "gpt2-large": _shape(36, 1280, 20, 1024),
    "gpt2-xl": _shape(48, 1600, 25, 1024),
    "gpt2-1.5b": _shape(48, 1600, 25, 1024),
    "gpt3-125m": _shape(12, 768, 12, 2048),
    "gpt3-350m": _shape(24, 1024, 16, 2048),
    "gpt3-760m": _shape(24, 1536, 16, 2048),
    "gpt3-1.3b": _shape(24, 2048, 16, 2048),
    "gpt3-2.7b": _shape(32, 2560, 32, 2048),
    "gpt3-6.7b": _shape(32, 4096, 32, 2048),
    "gpt3-13b": _shape(40, 5120, 40, 2048),
    "gpt3-175b": _shape(96, 12288, 96, 2048),
    "llama-7b": _shape(32, 4096, 32, 4096, f"{_LLAMA} --ffn-hidden-size 11008"),
    "llama-13b": _shape(40, 5120, 40, 4096, f"{_LLAMA} --ffn-hidden-size 13824"),
    "llama-30b": _shape(60, 6656, 52, 2048, f"{_LLAMA} --ffn-hidden-size 17920"),
    "llama-65b": _shape(80, 8192, 64, 2048, f"{_LLAMA} --ffn-hidden-size 22016"),
    "llama2-70b": _shape(
        *(80, 8192, 64, 4096),
        f"{_LLAMA} --ffn-hidden-size 28672 --group-query-attention --num-query-groups 8",
    ),
    "llama3-8b": _shape(32, 4096, 32, 8192, f"{_LLAMA_3} --ffn-hidden-size 14336"),
    "llama3-70b": _shape(80, 8192, 64, 8192, f"{_LLAMA_3} --ffn-hidden-size 28672"),
}


def model_flags(model: str, folder: Path, setting: str = "MODEL=") -> list[str]:
    """Return the trainer's flags for a model.

    Args:
        model: a name of :data:`MODELS`, or a file of flags in which ``#`` begins a comment.
        folder: what a relative file name starts from.
        setting: how messages introduce the model.

    Raises:
        ConfigError: it is neither.
    """
    if model in MODELS:
        return MODELS[model].split()
    path = folder / model
    if path.is_file():
        try:
            return shlex.split(path.read_text(), comments=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting}{model}: {path} cannot be read: {error}") from error
    nearest = difflib.get_close_matches(model.lower(), MODELS, n=1)
    hint = f"the nearest name is {nearest[0]}" if nearest else f"names are {', '.join(MODELS)}"
    raise ConfigError(f"{setting}{model}: neither a model's name nor a file of flags; {hint}")
