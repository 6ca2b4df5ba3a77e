#!/usr/bin/env bash
# Trains a small mixture-of-experts model on one machine, on CPUs or GPUs. Each of 2 pipeline stages
# has 2 ranks, which share the 8 experts of a layer.
#
#   bash examples/gpt/moe_small.sh
#   EXPERT_PARALLEL=1 PIPELINE_PARALLEL=2 bash examples/gpt/moe_small.sh --train-iters 20
#
# Options of the trainer may follow; they override the options below. The data is random.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)

PYTHON=${PYTHON:-python}
PIPELINE_PARALLEL=${PIPELINE_PARALLEL:-2}
EXPERT_PARALLEL=${EXPERT_PARALLEL:-2}
RUN_DIR=${RUN_DIR:-$root/runs/moe-small}

MODEL_ARGS=(
  --num-layers 4
  --hidden-size 128
  --num-attention-heads 4
  --seq-length 128
  --max-position-embeddings 128
  --normalization RMSNorm
  --swiglu
  --disable-bias-linear
  --attention-dropout 0.0
  --hidden-dropout 0.0
)

# The first layer is dense. Each other layer has a shared expert and 8 routed experts, and each
# token uses 2 of these.
EXPERT_ARGS=(
  --num-experts 8
  --moe-layer-freq "[0]+[1]*3"
  --moe-ffn-hidden-size 128
  --moe-shared-expert-intermediate-size 128
  --moe-router-topk 2
  --moe-router-score-function sigmoid
  --moe-router-enable-expert-bias
  --moe-aux-loss-coeff 1e-3
  --moe-token-dispatcher-type alltoall
)

PARALLEL_ARGS=(
  --pipeline-model-parallel-size "$PIPELINE_PARALLEL"
  --expert-model-parallel-size "$EXPERT_PARALLEL"
  --pipeline-schedule adaptive
)

TRAINING_ARGS=(
  --micro-batch-size 2
  --global-batch-size 32
  --train-iters 100
  --lr 2e-3
  --mock-data
  --tokenizer-type NullTokenizer
  --vocab-size 1023
)

OUTPUT_ARGS=(
  --trace-dir "$RUN_DIR/traces"
  --log-interval 1
  --eval-iters 2
)

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

exec "$PYTHON" -m megatron.adaptive job launch --standalone \
  --nproc-per-node "$((PIPELINE_PARALLEL * EXPERT_PARALLEL))" "$root/pretrain_gpt.py" \
  "${MODEL_ARGS[@]}" "${EXPERT_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
  "${OUTPUT_ARGS[@]}" "$@"
