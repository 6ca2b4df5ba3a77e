#!/usr/bin/env bash
# Trains a small model like DeepSeek-V3 on two processes, CPU or GPU: latent attention, a dense
# layer followed by layers with routed and shared experts, multi-token prediction, and a
# V-shaped placement with a run-time rule.
#
#   bash examples/gpt/deepseek_small.sh
#
# Options of the trainer may follow; they override the options below. The data are random tokens.
# With DATA_DIR=data/stdlib, they are the corpus that is created by
# python tools/make_corpus.py --output-dir data/stdlib.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)

PYTHON=${PYTHON:-python}
EXPERT_PARALLEL=${EXPERT_PARALLEL:-1}
RUN_DIR=${RUN_DIR:-$root/runs/deepseek-small}

MODEL_ARGS=(
  --num-layers 7
  --hidden-size 128
  --ffn-hidden-size 384
  --num-attention-heads 4
  --seq-length 128
  --max-position-embeddings 128
  --position-embedding-type rope
  --normalization RMSNorm
  --swiglu
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --attention-dropout 0
  --hidden-dropout 0
)

LATENT_ARGS=(
  --multi-latent-attention
  --q-lora-rank 48
  --kv-lora-rank 32
  --qk-head-dim 32
  --qk-pos-emb-head-dim 16
  --v-head-dim 32
  --qk-layernorm
)

EXPERT_ARGS=(
  --num-experts 8
  --moe-layer-freq "[0]+[1]*6"
  --moe-ffn-hidden-size 96
  --moe-shared-expert-intermediate-size 96
  --moe-router-topk 2
  --moe-router-score-function sigmoid
  --moe-router-enable-expert-bias
  --moe-router-load-balancing-type seq_aux_loss
  --moe-aux-loss-coeff 1e-4
  --moe-token-dispatcher-type alltoall
  --expert-model-parallel-size "$EXPERT_PARALLEL"
)

PREDICTION_ARGS=(
  --mtp-num-layers 1
  --mtp-loss-scaling-factor 0.3
)

# The last stage also has the prediction layer and two losses.
PARALLEL_ARGS=(
  --pipeline-model-parallel-size 2
  --pipeline-model-parallel-layout "Ett|tt|tt|tmL"
  --pipeline-schedule adaptive
)

TRAINING_ARGS=(
  --micro-batch-size 2
  --global-batch-size 16
  --train-iters 100
  --lr 2e-3
  --min-lr 2e-4
  --lr-decay-style cosine
  --weight-decay 0.1
  --adam-beta2 0.95
)

if [[ -n "${DATA_DIR:-}" ]]; then
  DATA_ARGS=(
    --data-path "$DATA_DIR/corpus_text_document"
    --vocab-file "$DATA_DIR/vocab.json"
    --merge-file "$DATA_DIR/merges.txt"
    --tokenizer-type GPT2BPETokenizer
    --split "969,30,1"
  )
else
  DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 255)
fi

OUTPUT_ARGS=(
  --tensorboard-dir "$RUN_DIR/tensorboard"
  --trace-dir "$RUN_DIR/traces"
  --log-interval 10
  --eval-interval 100
  --eval-iters 2
)

# With several ranks on few processors, more threads per rank would slow down all ranks.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# In a single hardware queue, a message between stages could wait forever behind a collective of
# other ranks. 8 is CUDA's default. Overlapping expert-parallel communication needs more queues.
case " $* " in
  *" --overlap-moe-expert-parallel-comm "*) queues=32 ;;
  *) queues=8 ;;
esac
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-$queues}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

exec "$PYTHON" -m megatron.adaptive job launch --standalone \
  --nproc-per-node "$((2 * EXPERT_PARALLEL))" "$root/pretrain_gpt.py" \
  "${MODEL_ARGS[@]}" "${LATENT_ARGS[@]}" "${EXPERT_ARGS[@]}" "${PREDICTION_ARGS[@]}" \
  "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "$@"
