"""Tests rules for combinations of flags. An error must name value, rule and remedy in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conftest import cases_of, check_words, complaint, small

BROKEN = """\
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 @6
    => world size 6 | tensor 2 x pipeline 2 | = 4 | multiple of 4
--tensor-model-parallel-size 2 => world size 1 | multiple of 2
@0 => world size 0
--num-layers 10 --pipeline-model-parallel-size 2 --model-chunks 2 @2
    => --num-layers 10 | 4 stages | multiple of 4 | --partition | 2-3-3-2
--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 @2
    => --num-layers 4 | pipeline 2 | stage 3 = 6
--pipeline-model-parallel-size 2 --model-chunks 2 --partition 2-2 @2
    => --partition 2-2 | has 2 stages | pipeline 2 x chunks 2 requires 4
--pipeline-model-parallel-size 2 --partition 2-3 @2
    => --partition 2-3 | has 5 layers | --num-layers is 4
--global-batch-size 6 @2 => --global-batch-size 6 | --micro-batch-size 2 x data parallel size 2 = 4
--num-attention-heads 2 --tensor-model-parallel-size 4 @4
    => --num-attention-heads 2 | --tensor-model-parallel-size 4
--group-query-attention --num-query-groups 3 --num-attention-heads 6 --hidden-size 60
    --tensor-model-parallel-size 2 @2
    => --num-query-groups 3 | --tensor-model-parallel-size 2
--ffn-hidden-size 33 --tensor-model-parallel-size 2 @2
    => --ffn-hidden-size 33 | --tensor-model-parallel-size 2
--hidden-size 66 => --hidden-size 66 | --num-attention-heads 4
--hidden-size 20 --swiglu => --swiglu | --hidden-size 20 | --ffn-hidden-size
--seq-length 64 => --seq-length 64 | --max-position-embeddings 32
--num-query-groups 2 => --num-query-groups 2 | --group-query-attention
--group-query-attention --num-query-groups 3 => --num-attention-heads 4 | --num-query-groups 3
--swiglu --squared-relu => --swiglu | --squared-relu
--no-position-embedding => --no-position-embedding | learned_absolute | rope
--transformer-impl transformer_engine => not installed | --transformer-impl local
--attention-backend flash => --attention-backend flash | --transformer-impl transformer_engine
--attention-softcap 5 --use-flash-attn => --attention-softcap 5 | --use-flash-attn
--window-rotary-base 100 => --window-rotary-base 100 | --window-size
--num-experts 4 --moe-router-group-best 2 => --moe-router-group-best 2 | --moe-router-num-groups
--sequence-slices 3 => --sequence-slices 3 | 32 tokens | slices of 10 | at least 16 | 2 or fewer
--sequence-slices auto => --sequence-slices auto | --pipeline-schedule auto
--sequence-slices auto --pipeline-schedule auto => auto | --pipeline-model-parallel-size above 1
--sequence-slices auto --pipeline-schedule auto PP2 --variable-seq-lengths @2
    => --sequence-slices auto | --variable-seq-lengths
--sequence-slices auto --pipeline-schedule auto PP2 --seq-length 31 @2
    => --sequence-slices auto | --seq-length 31 | at least 32
--sequence-slices none => --sequence-slices | 'none'
--sequence-slices 0 => --sequence-slices | 0 is too small; give at least 1
--sequence-slices auto --pipeline-schedule 1f1b PP2 @2
    => --sequence-slices auto requires --pipeline-schedule auto | 1f1b (auto measures
--sequence-slices 2 --pipeline-schedule 1f1b => --sequence-slices 2 | 1f1b | adaptive | seq-1f1b
--sequence-slices 2 --pipeline-schedule zb-v --model-chunks 2 PP2 @2
    => --sequence-slices 2 | zb-v | adaptive | auto | file | seq-1f1b
--sequence-slices 2 --context-parallel-size 2 @2
    => --sequence-slices 2 | --context-parallel-size 2 | sequence slices
--sequence-slices 2 --num-experts 4
    => --sequence-slices 2 | --num-experts 4 | --moe-router-load-balancing-type none | whole
--sequence-slices 2 --num-experts 4 --moe-router-load-balancing-type none --moe-z-loss-coeff 0.1
    => --num-experts 4 | --sequence-slices 2 | --moe-z-loss-coeff 0.1
--slice-tokens 16 --record-schedule x => --slice-tokens 16 | --record-schedule x | between steps
--use-distributed-optimizer --optimizer sgd => --optimizer sgd | adam
--overlap-param-gather => --overlap-param-gather | --use-distributed-optimizer
--overlap-param-gather --use-distributed-optimizer => --overlap-param-gather | --overlap-grad-reduce
PP2 --pipeline-schedule interleaved @2
    => interleaved | --num-virtual-stages-per-pipeline-rank 1 | 1f1b
--model-chunks 2 --pipeline-schedule interleaved
    => rank 2 | several pipeline ranks | --pipeline-model-parallel-size above 1
PP2 --model-chunks 2 --pipeline-schedule 1f1b @2 => 1f1b | rank 2 | interleaved
PP2 --model-chunks 2 --pipeline-schedule megatron --no-overlap-p2p-communication @2
    => megatron | --no-overlap-p2p-communication | above 2
PP2 --model-chunks 2 --pipeline-schedule interleaved --global-batch-size 6 @2
    => 3 microbatches | groups of 2 | multiple of 4 | adaptive
PP2 --model-chunks 2 --pipeline-schedule megatron --global-batch-size 2 @2
    => 1 microbatches | groups of 2
PP2 --model-chunks 2 --pipeline-schedule interleaved
    --microbatch-group-size-per-virtual-pipeline-stage 1 @2
    => stage 1 | pipeline size 2
PP2 --pipeline-schedule 1f1b --activation-cap 2 @2 => --activation-cap 2 | 1f1b | adaptive
--repartition auto => --repartition auto | --pipeline-model-parallel-size 1 | above 1
PP2 --repartition auto --pipeline-schedule auto --slice-tokens 16 --variable-seq-lengths @2
    => --pipeline-schedule auto | --slice-tokens 16 | --repartition auto | must not move
PP2 --repartition auto --pipeline-schedule megatron @2
    => --repartition auto | megatron | simulated | adaptive
PP2 --pipeline-placement v @2
    => --pipeline-placement v | rank 1 | --num-virtual-stages-per-pipeline-rank above 1
PP2 --model-chunks 2 --pipeline-placement v --pipeline-schedule megatron @2
    => --pipeline-placement v | megatron | adaptive
--transport-slots 1 => --transport-slots | at least 2
--transport tcp --rdma-device mlx5_0
    => --rdma-device mlx5_0 requires | got --transport tcp | --transport auto, rdma
--transport gloo --pipeline-schedule megatron
    => --transport gloo and --pipeline-schedule megatron | uses megatron-core's communication
UNEQUAL @4 => --stage-data-parallel-sizes 2-1 | needs 3 processes | has 4
UNEQUAL --pipeline-model-parallel-size 3 @3
    => --stage-data-parallel-sizes 2-1 | 2 entries | --pipeline-model-parallel-size is 3
UNEQUAL --stage-data-parallel-sizes 2-0 @2 => '2-0' | as in 2-1-1
UNEQUAL --tensor-model-parallel-size 2 @6 => 2-1 | --tensor-model-parallel-size 2
UNEQUAL --model-chunks 2 @3 => 2-1 | rank 2
UNEQUAL --repartition auto @3 => 2-1 | --repartition auto
UNEQUAL --pipeline-schedule zb-h1 @3 => 2-1 | zb-h1 | 1f1b, adaptive, gpipe
UNEQUAL --micro-batch-size 2 --global-batch-size 6 @3 => --global-batch-size 6 | = 4
--fp16-lm-cross-entropy => --fp16-lm-cross-entropy | --fp16
--grad-reduce-in-bf16 => --grad-reduce-in-bf16 | --bf16
--fp32-residual-connection => --fp32-residual-connection | --fp16 or --bf16
--bf16 --loss-scale 8 => --loss-scale 8 | --fp16
--fp16 --min-loss-scale 8 --initial-loss-scale 4 => --min-loss-scale 8 | 4
--min-lr 0.1 => --min-lr 0.1 | --lr 0.001
--decoupled-min-lr 0.1 => --decoupled-min-lr | --decoupled-lr
--decoupled-lr 0.01 --decoupled-min-lr 0.1 => 0.1 | --decoupled-lr 0.01
--lr-warmup-iters 10 => --lr-warmup-iters 10 | 10 iters
--lr-warmup-iters 6 --lr-decay-iters 5 => --lr-warmup-iters 6 | 5 iters | --lr-decay-iters
--lr-decay-style WSD => WSD | --lr-wsd-decay-iters
--lr-decay-style WSD --lr-wsd-decay-iters 11 => 11 | 10 iters
--start-weight-decay 0.1 => --start-weight-decay | constant | --weight-decay
--weight-decay-incr-style linear => linear | requires --start-weight-decay
--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1
    => --start-weight-decay 0.2 | --end-weight-decay 0.1
--recompute-activations --recompute-granularity full => --recompute-activations | full | selective
--recompute-granularity full => full | --recompute-method | uniform and 1
--recompute-method block => --recompute-method block requires --recompute-granularity full
--recompute-granularity selective --recompute-num-layers 1
    => --recompute-num-layers | selective | full
--recompute-modules mlp => --recompute-modules | selective
--recompute-granularity full --recompute-method block --recompute-num-layers 1 --recompute-modules
    mlp
    => --recompute-modules | full
--distribute-saved-activations => --distribute-saved-activations | full
--checkpoint-activations --distribute-saved-activations
    => --distribute-saved-activations | --tensor-model-parallel-size 1
--split 1,2,3,4 => --split | '1,2,3,4' | 949,50,1
--split 0,0 => --split | '0,0'
--pack-to 64 => --pack-to 64 | --variable-seq-lengths
--sft => --sft | --variable-seq-lengths
--variable-seq-lengths --reset-position-ids => --reset-position-ids | never joined
--variable-seq-lengths --pack-to 64 => --micro-batch-size 2 | --pack-to 64 | one row
--variable-seq-lengths --pack-to 31 --micro-batch-size 1 => --seq-length 32 is above --pack-to 31
--balance-replicas lengths @2 => --balance-replicas lengths | --variable-seq-lengths | speed
--balance-replicas speed --pipeline-schedule megatron @2
    => --balance-replicas speed | --pipeline-schedule megatron | same number
PP2 --balance-replicas both --stage-data-parallel-sizes 2-1 @3
    => --balance-replicas both | --stage-data-parallel-sizes
PP2 --variable-seq-lengths --pack-to 64 --micro-batch-size 1 --model-chunks 2
    --pipeline-schedule interleaved --global-batch-size 7 @2
    => 7 | groups
--vocab-file v => GPT2BPETokenizer | add --merge-file
--save checkpoints => --save | --save-interval
--profile-step-start 13 --profile-step-end 12 => --profile-step-start 13 is above
--reset-attention-mask --no-create-attention-mask-in-dataloader => exclude each other
NO_DATA --vocab-size 9 => there is no training data | --data-path | --mock-data
NO_DATA --valid-data-path x => --train-data-path
NO_DATA --data-path x => GPT2BPETokenizer | --vocab-file and --merge-file
NO_DATA --mock-data --tokenizer-type NullTokenizer => NullTokenizer | --vocab-size
GROWS --train-samples 10 --rampup-batch-size 8 2 10 => starts at 8 | start lower
GROWS --train-samples 10 --rampup-batch-size 2 4 10 => never reaches | 8 | must divide | 6
GROWS --train-samples 10 --rampup-batch-size 1 1 10 => 2 x data parallel size 1 = 2
GROWS --train-samples 4 => --train-samples 4 | --global-batch-size 8
GROWS --micro-batch-size 1 --rampup-batch-size 2 1 10 --model-chunks 2
    --pipeline-model-parallel-size 2 --pipeline-schedule interleaved @2
    => 3 microbatches (global batch 3)
--sequence-parallel => --tensor-model-parallel-size 1
PARALLEL ENGINE --seq-length 31 @2 => --seq-length 31 is not a multiple of | size 1 = 2
--context-parallel-size 2 --seq-length 30 @2
    => --seq-length 30 is not a multiple of 2 x --context-parallel-size 2 = 4
--context-parallel-size 2 --window-size 8,0 @2
    => --window-size | these layers do not support sliding windows | --context
--mtp-num-layers 1 => --position-embedding-type learned_absolute | --mtp-num-layers 1 | rope
--mtp-num-layers 0 => --mtp-num-layers | at least 1
--heterogeneous-layers-config-path /no/file => /no/file: No such file | block_configs
--heterogeneous-layers-config-encoded-json {} => layer 1 does not have the format | KeyError
--heterogeneous-layers-config-encoded-json [ => layer 1 does not have the format | JSONDecodeError
UNLIKE{"attention":{"num_query_groups":2,"no_op":1},"ffn":{"ffn_hidden_size":8}}]}
    => layer 1 | num_query_groups 2 of a replaced block
UNLIKE{"attention":{"num_query_groups":2},"ffn":{"ffn_hidden_size":8}}]}
    => describes 1 layers | --num-layers 4
UNLIKE{"attention":{"num_query_groups":1},"ffn":{"ffn_hidden_size":8}}]} --num-layers 1
    --tensor-model-parallel-size 2 @2
    => layer 1 has 1 key and value heads | size 2 | multiples
UNLIKE{"attention":{"num_query_groups":4},"ffn":{"ffn_hidden_size":8}}]} --num-layers 1 MTP
    => --mtp-num-layers 1 | these features require layers of equal size
MTP --context-parallel-size 2 @2 => --mtp-num-layers 1 | --calculate-per-token-loss
PP2 MTP --pipeline-model-parallel-layout Ett|ttL @2 => Ett|ttL | 0 layers | (m) | make them equal
PP2 --pipeline-model-parallel-layout Ett|ttmL @2 => 1 layers | (m) | make them equal
PP2 MTP --pipeline-model-parallel-layout Et|t|ttm|L @2
    => Et|t|ttm|L | stage 2 | with v placement | last stage
PP2 MTP --pipeline-schedule interleaved --pipeline-model-parallel-layout Et|tttm||L @2
    => stage 1 | with loop placement | any rank except the first
PP2 --pipeline-model-parallel-layout Ett|ttt|L @2 => has 3 stages | pipeline 2 x chunks
PP2 --model-chunks 2 --pipeline-model-parallel-layout Ett|ttL @2 => 2 stages | pipeline 2 x chunks 2
PP2 --pipeline-model-parallel-layout Ett|tttL @2 => 5 transformer layers (t) | --num-layers 4
PP2 --decoder-first-pipeline-num-layers 5 @2 => 5 | --num-layers 4 | do not divide evenly
PP2 --account-for-embedding-in-pipeline-split @2 => --account | --num-layers 4 | evenly over 2
PP2 --model-chunks 2 --decoder-last-pipeline-num-layers 2 @2
    => 2 cannot be used with V placement | loop
PARALLEL ENGINE --checkpoint-activations --distribute-saved-activations @2 => --sequence-parallel
--moe-grouped-gemm => --moe-grouped-gemm requires --num-experts
--expert-model-parallel-size 2 @2 => --expert-model-parallel-size 2 requires --num-experts
--num-experts 0 => --num-experts | 0 is too small
--num-experts 4 --moe-router-topk 5 => --moe-router-topk 5 is above --num-experts 4
--num-experts 4 --moe-expert-capacity-factor 0 => --moe-expert-capacity-factor 0 | above 0
--num-experts 4 --moe-layer-freq [1]*3 => --moe-layer-freq [1]*3 has 3 entries | --num-layers 4
--num-experts 4 --moe-layer-freq 0 => --moe-layer-freq 0 | at least 1
--num-experts 4 --moe-aux-loss-coeff 0.1 0.2 => 0.1 0.2 | same number of entries
--num-experts 4 --moe-token-dispatcher-type flex => flex requires GPUs and DeepEP | alltoall
--num-experts 4 --variable-seq-lengths => allgather | alltoall
--num-experts 4 --moe-grouped-gemm --disable-bias-linear => --bf16
--num-experts 4 --moe-shared-expert-intermediate-size 8 => 8 requires --disable-bias-linear
--num-experts 4 --moe-latent-size 8 => --moe-latent-size 8 requires | got --transformer-impl local
--num-experts 4 --expert-model-parallel-size 3 @3 => --num-experts 4 | 3 | not a multiple
--num-experts 4 --expert-model-parallel-size 4 --global-batch-size 12 @6
    => world size 6 | expert tensor 1 x expert 4
--num-experts 4 --disable-bias-linear --tensor-model-parallel-size 2 @2 => 2 | --sequence-parallel
--num-experts 4 --expert-tensor-parallel-size 2 --disable-bias-linear @2
    => --expert-tensor-parallel-size 2 | make the first two equal
--num-experts 4 --overlap-moe-expert-parallel-comm
    => --overlap-moe-expert-parallel-comm requires | got --expert-model-parallel-size 1 | above 1
SPREAD @2 => --moe-token-dispatcher-type allgather | cannot pause | alltoall
--num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1
    --global-batch-size 8 --balance-replicas speed @2 => global_aux_loss | same number
EXCHANGE --pipeline-schedule 1f1b @2 => --pipeline-schedule 1f1b | combined-1f1b
EXCHANGE --pipeline-schedule auto @2 => --pipeline-schedule auto | adaptive
EXCHANGE PP2 --repartition auto @4 => --repartition auto | would change the results
EXCHANGE --checkpoint-activations @2 => --recompute-granularity full | a forward pass is paused
EXCHANGE --moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap
    --disable-bias-linear @2 => --moe-shared-expert-overlap | remove one
--num-experts 4 --heterogeneous-layers-config-encoded-json {"block_configs":[]}
    => --num-experts 4 | remove one
PP2 --num-experts 4 --stage-data-parallel-sizes 2-1 --pipeline-schedule 1f1b @3
    => --stage-data-parallel-sizes 2-1 | experts
--record-schedule /dev/null/orders.json => --record-schedule | cannot write to
"""


@pytest.mark.parametrize(("flags", "world_size", "phrases"), cases_of(BROKEN))
def test_a_broken_rule_is_named(flags: str, world_size: int, phrases: list[str]) -> None:
    check_words(flags, world_size, phrases)


RUNNING = """\
PP2
PP2 --global-batch-size 6 --model-chunks 2
PP2 --pipeline-schedule 1f1b
PP2 --pipeline-schedule megatron --model-chunks 2
PP2 --pipeline-schedule interleaved --model-chunks 2
PP2 --pipeline-schedule interleaved --model-chunks 2 --global-batch-size 10
    --microbatch-group-size-per-virtual-pipeline-stage 3
PP2 --partition 4-0 --pipeline-schedule megatron
PP2 --partition 0-4-0-0 --model-chunks 2 --activation-cap 1.5
PP2 --partition 0-4-0-0 --model-chunks 2 --pipeline-placement v
PP2 --partition 1-1-0-1-1-0 --model-chunks 3 --pipeline-placement v
PP2 --pipeline-placement loop --pipeline-schedule 1f1b
"""


@pytest.mark.parametrize("flags", [flags for flags, _, _ in cases_of(RUNNING)])
def test_schedules_that_run(flags: str) -> None:
    config = small(flags, world_size=2)
    assert sum(config.layers_per_stage) == 4
    assert len(config.layers_per_stage) == config.num_stages


@pytest.mark.parametrize(
    "flag", ["--save-interval 1 --save", "--tensorboard-dir", "--trace-dir", "--data-cache-path"]
)
def test_an_output_folder_that_cannot_be_made_is_named(tmp_path: Path, flag: str) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("kept", encoding="utf-8")
    text = complaint(f"{flag} {blocker}/deeper/still")
    assert f"cannot write to {flag.split()[-1]} {blocker}/deeper/still" in text
    assert f"{blocker} is a file" in text
    assert blocker.read_text(encoding="utf-8") == "kept"


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="requires /proc, which rejects new files"
)
def test_an_output_folder_on_a_file_system_that_takes_none_is_named() -> None:
    assert "cannot write to --trace-dir /proc/none/x" in complaint("--trace-dir /proc/none/x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to all folders")
def test_an_output_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in complaint(f"--trace-dir {tmp_path}/x")


def test_trying_an_output_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    small(f"--save {tmp_path}/a/b --save-interval 5 --trace-dir {tmp_path}/t")
    assert list(tmp_path.iterdir()) == []
