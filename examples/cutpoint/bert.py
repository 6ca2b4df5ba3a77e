"""Trains BERT of Hugging Face transformers, built from its configuration without a download.

Sentences have different lengths, so every stage needs the attention mask.

    bash prerequisite.sh --examples
    torchrun --nproc-per-node 2 examples/cutpoint/bert.py --pipeline-size 2
"""

from __future__ import annotations

from typing import Any

import torch
from common import Batch, parse, train
from transformers.models.bert import BertConfig, BertForMaskedLM

from megatron.adaptive import CutPoint

MASK = 1


def build(**changes: Any) -> BertForMaskedLM:
    """Returns the model. Its weights are the same on every process."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 128, "max_position_embeddings": 32, "hidden_size": 64}
    depth = {"num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertForMaskedLM(BertConfig(**{**sizes, **depth, **changes}))
    for layer in model.bert.encoder.layer:
        CutPoint.after(layer)
    return model


def make_batch(samples: int) -> Batch:
    """Returns ``samples`` random sentences. Every fifth token is masked and must be predicted."""
    generator = torch.Generator().manual_seed(2)
    position = torch.arange(24)
    tokens = (torch.randint(4, 124, (samples, 1), generator=generator) + 3 * position) % 124 + 4
    lengths = torch.randint(12, 25, (samples, 1), generator=generator)
    hidden = (position % 5 == 2) & (position < lengths)
    return {
        "input_ids": tokens.masked_fill(hidden, MASK),
        "attention_mask": (position < lengths).long(),
        "labels": tokens.masked_fill(~hidden, -100),
    }


if __name__ == "__main__":
    train(parse(__doc__), build(), make_batch)
