"""Prints the flags for megatron-core's settings, and the effect of newer flags, as JSON.

The flags depend on the release of megatron-core that is imported. The output is ``{"flags": [str,
...], "answers": {...}}``, with an answer for each flag in ``NEWER``. Each of these flags is parsed
with a value that differs from its default, and passed to a configuration class of megatron-core.

An answer is ``{"given": ..., "has": ...}``, with the value that was passed and the value that the
class has. If the flag is rejected, the answer is ``{"refused": str}``, with the error message.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402

from megatron.adaptive.config.arguments import parse  # noqa: E402
from megatron.adaptive.config.flags import fields_of  # noqa: E402
from megatron.adaptive.config.megatron_core_flags import CoreConfig  # noqa: E402
from megatron.adaptive.config.unsupported_flags import NEWER  # noqa: E402
from megatron.adaptive.errors import ConfigError  # noqa: E402
from megatron.adaptive.gpt import build_model  # noqa: E402

SMALL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3
    --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --disable-bias-linear
    --num-experts 2 --moe-ffn-hidden-size 16 --mtp-num-layers 1 --multi-latent-attention
    --rope-type rope --position-embedding-type rope
"""


def words_of(spec: Any) -> list[str]:
    """Returns arguments that set the flag ``spec`` to another value than its default."""
    name = spec.name
    if spec.choices:
        others = [choice for choice in spec.choices if choice != spec.default]
        return [name, str(others[0])]
    if spec.is_switch:
        return [name]
    if spec.base is float:
        return [name, "0.5"]
    if spec.base is int:
        return [name, "16"]
    return [name, "word"]


def answer(spec: Any) -> dict[str, Any]:
    """Parses the flag ``spec``, and returns its answer as described at the top of this module."""
    try:
        config = parse([*SMALL.split(), *words_of(spec)], world_size=1)
        value = getattr(config.core, spec.dest)
        made = build_model.transformer_config(config, accelerator.detect(0))
        for kind in (OptimizerConfig, DistributedDataParallelConfig):
            if spec.dest in {field.name for field in dataclasses.fields(kind)}:
                made = build_model.checked(kind, build_model.core_settings(config, kind))
    except ConfigError as error:
        return {"refused": str(error)}
    has = getattr(made, spec.dest)
    return {"given": repr(value), "has": repr(tuple(has) if isinstance(has, list) else has)}


def main() -> None:
    """Prints the names of all flags, and the answers for the flags in ``NEWER``, as JSON."""
    specs = fields_of(CoreConfig)
    answers = {spec.name: answer(spec) for spec in specs if set(spec.names) & set(NEWER)}
    flags = [name for spec in specs for name in spec.names]
    json.dump({"flags": flags, "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
