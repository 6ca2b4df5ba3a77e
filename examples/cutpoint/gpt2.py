"""Trains GPT-2 of Hugging Face transformers, built from its configuration without a download.

The embedding and the output layer use the same parameter, so the first and the last stage share it.

    bash prerequisite.sh --examples
    torchrun --nproc-per-node 4 examples/cutpoint/gpt2.py
"""

from __future__ import annotations

from typing import Any

import torch
from common import Batch, parse, train
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

from megatron.adaptive import CutPoint

ARGUMENTS = {"use_cache": False}


def build(**changes: Any) -> GPT2LMHeadModel:
    """Returns the model. Its weights are the same on every process."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 128, "n_positions": 32, "n_embd": 64, "n_layer": 6, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**{**sizes, **ends, **changes}))
    for block in model.transformer.h:
        CutPoint.after(block)
    return model


def make_batch(samples: int) -> Batch:
    """Returns ``samples`` synthetic texts, in which each token determines the next token."""
    generator = torch.Generator().manual_seed(2)
    start = torch.randint(0, 128, (samples, 1), generator=generator)
    ids = (start + 7 * torch.arange(32)) % 128
    return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    train(parse(__doc__), build(), make_batch, arguments=ARGUMENTS)
