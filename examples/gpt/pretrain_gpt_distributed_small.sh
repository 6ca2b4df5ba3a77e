#!/usr/bin/env bash
# Trains a small GPT on one machine, on CPUs or GPUs. run_single.sh runs this script, and you can
# copy and change it.
#
#   PIPELINE_PARALLEL=2 MODEL_CHUNKS=2 bash examples/gpt/pretrain_gpt_distributed_small.sh
#
# Options of the trainer may follow; they override the options below. The script needs data, which
# this command creates:
#   python tools/make_corpus.py --output-dir data/stdlib
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)

PYTHON=${PYTHON:-python}
PIPELINE_PARALLEL=${PIPELINE_PARALLEL:-2}
MODEL_CHUNKS=${MODEL_CHUNKS:-1}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}
DATA_PARALLEL=${DATA_PARALLEL:-1}
SCHEDULE=${SCHEDULE:-adaptive}
DATA_DIR=${DATA_DIR:-$root/data/stdlib}
RUN_DIR=${RUN_DIR:-$root/runs/small}
# This launcher checks the options before it starts ranks. You can use torchrun instead.
LAUNCHER=("$PYTHON" -m megatron.adaptive job launch)

DISTRIBUTED_ARGS=(
  --standalone
  --nproc-per-node "$((PIPELINE_PARALLEL * TENSOR_PARALLEL * DATA_PARALLEL))"
)

MODEL_ARGS=(
  --num-layers 8
  --hidden-size 128
  --num-attention-heads 4
  --seq-length 128
  --max-position-embeddings 128
  --attention-dropout 0.0
  --hidden-dropout 0.0
)

PARALLEL_ARGS=(
  --pipeline-model-parallel-size "$PIPELINE_PARALLEL"
  --tensor-model-parallel-size "$TENSOR_PARALLEL"
  --pipeline-schedule "$SCHEDULE"
)
if ((MODEL_CHUNKS > 1)); then
  PARALLEL_ARGS+=(--num-virtual-stages-per-pipeline-rank "$MODEL_CHUNKS")
fi

TRAINING_ARGS=(
  --micro-batch-size 2
  --global-batch-size 16
  --train-iters 200
  --lr 2e-3
  --min-lr 2e-4
  --lr-decay-style cosine
  --weight-decay 0.1
  --adam-beta2 0.95
  --clip-grad 1.0
)

# Add a default warm-up only if the options have none, because the trainer accepts only one warm-up.
if [[ " $* " != *" --lr-warmup-"* ]]; then
  TRAINING_ARGS+=(--lr-warmup-fraction 0.05)
fi

DATA_ARGS=(
  --data-path "$DATA_DIR/corpus_text_document"
  --vocab-file "$DATA_DIR/vocab.json"
  --merge-file "$DATA_DIR/merges.txt"
  --tokenizer-type GPT2BPETokenizer
  --split "969,30,1"
)

OUTPUT_ARGS=(
  --save "$RUN_DIR/checkpoints"
  --save-interval 100
  --tensorboard-dir "$RUN_DIR/tensorboard"
  --trace-dir "$RUN_DIR/traces"
  --log-interval 10
  --eval-interval 100
  --eval-iters 2
)
if [[ -d "$RUN_DIR/checkpoints" ]]; then
  OUTPUT_ARGS+=(--load "$RUN_DIR/checkpoints")
fi

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

exec "${LAUNCHER[@]}" "${DISTRIBUTED_ARGS[@]}" "$root/pretrain_gpt.py" \
  "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" \
  "${OUTPUT_ARGS[@]}" "$@"
