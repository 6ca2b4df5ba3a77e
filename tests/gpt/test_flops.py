"""Compares the formula for FLOPs with the matrix products that megatron-core's model runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.data.corpus import Corpus
from megatron.adaptive.errors import DataError
from megatron.adaptive.gpt.build_model import flops_per_token, stage_work

SMALL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 "
    "--mock-data --vocab-size 127"
)
PADDED_VOCAB_SIZE = 128


def settings(flags: str = "", base: str = SMALL, world_size: int = 1) -> TrainerConfig:
    installed = Installed(transformer_engine=False)
    arguments = f"{base} {flags}".split()
    return parse(arguments, world_size=world_size, last_wins=True, installed=installed)


def counted_flops(cfg: TrainerConfig) -> float:
    """Returns the model's FLOPs per token in a forward and a backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    from megatron.adaptive import accelerator
    from megatron.adaptive.gpt.build_model import build_chunks, transformer_config
    from megatron.adaptive.gpt.model_placement import placement_of

    length = cfg.model.seq_length
    device = accelerator.detect(0, backend="gloo")
    core = transformer_config(cfg, device)
    (chunk,) = build_chunks(cfg, core, device, placement_of(cfg), PADDED_VOCAB_SIZE)
    # Use evaluation mode, because the model would otherwise store losses for the log.
    model: Any = chunk.eval()
    tokens = torch.arange(length)[None]
    mask = torch.ones(length, length).triu(1).bool()[None, None]
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens, mask, labels=tokens).mean().backward()
    return counter.get_total_flops() / length


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--ffn-hidden-size 96",
        "--swiglu --disable-bias-linear",
        "--group-query-attention --num-query-groups 2",
        "--kv-channels 24 --group-query-attention --num-query-groups 1 --swiglu",
        "--seq-length 8",
        "--mtp-num-layers 2 --position-embedding-type rope",
        "--num-experts 4 --moe-layer-freq [0,1,1] --moe-ffn-hidden-size 48 --disable-bias-linear "
        "--moe-shared-expert-intermediate-size 32",
        '--swiglu --num-layers 2 --heterogeneous-layers-config-encoded-json {"block_configs":['
        '{"attention":{"num_query_groups":2},"ffn":{"ffn_hidden_size":48}},'
        '{"attention":{"num_query_groups":1},"ffn":{"ffn_mult":null,"no_op":true}}]}',
    ],
)
def test_equals_the_real_models_matrix_products(flags: str) -> None:
    cfg = settings(flags)
    model = cfg.model
    # Without a fused kernel, attention also computes the scores that the causal mask removes. These
    # are half of all scores.
    masked_scores = model.num_attention_heads * model.kv_channels * model.seq_length
    masked_half = 6 * (model.num_layers + (model.mtp_num_layers or 0)) * masked_scores
    assert flops_per_token(cfg) + masked_half == counted_flops(cfg)


def test_is_six_per_parameter_of_a_large_model_with_short_sequences() -> None:
    cfg = settings(
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 1 "
        "--max-position-embeddings 1"
    )
    # This is the number of parameters without the embeddings. The GPT-3 paper counts in the same
    # way.
    parameters = 12 * 96 * 12288**2
    assert flops_per_token(cfg) / (6 * parameters) == pytest.approx(1, rel=1e-3)


def test_counts_the_vocabulary_but_no_recomputation() -> None:
    again = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    cfg = settings()
    assert flops_per_token(settings(again)) == flops_per_token(cfg)
    larger = flops_per_token(cfg, padded_vocab_size=PADDED_VOCAB_SIZE + 100)
    assert larger - flops_per_token(cfg) == 6 * 64 * 100


def test_asks_the_tokenizer_for_its_vocabulary(corpus: Corpus, tmp_path: Path) -> None:
    def with_files(vocab: Path) -> TrainerConfig:
        files = f"--vocab-file {vocab} --merge-file {corpus.merge_file}"
        # The vocabulary has 400 tokens, which this flag pads to 401.
        flags = "--make-vocab-size-divisible-by 401"
        return settings(flags, SMALL.replace("--vocab-size 127", files))

    cfg = with_files(Path(corpus.vocab_file))
    assert flops_per_token(cfg) == flops_per_token(cfg, padded_vocab_size=401)
    with pytest.raises(DataError, match=r"missing\.json"):
        flops_per_token(with_files(tmp_path / "missing.json"))


def test_work_of_stages_adds_up_to_the_whole_model() -> None:
    cfg = settings(
        "--partition 1-0-2-1 --num-layers 4 --pipeline-model-parallel-size 4", world_size=4
    )
    work = stage_work(cfg, PADDED_VOCAB_SIZE)
    assert work[:3] == (1, 0, 2)
    logits = 6 * 64 * PADDED_VOCAB_SIZE
    layer = (flops_per_token(cfg) - logits) / 4
    assert work[3] == pytest.approx(1 + logits / layer)


def test_work_of_unlike_layers_counts_what_they_do() -> None:
    cfg = settings(
        "--num-experts 4 --moe-router-topk 2 --moe-layer-freq 2 --num-layers 4"
        " --partition 1-3 --pipeline-model-parallel-size 2",
        world_size=2,
    )
    first, rest = stage_work(cfg, 1)  # The first and the third of the four layers have experts.
    assert first > 1
    # The last stage also computes the logits, but the vocabulary has only one token.
    assert rest == pytest.approx(first + 2, abs=0.01)
