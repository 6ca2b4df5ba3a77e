#!/usr/bin/env bash
# Trains GPT 345M in bfloat16 on the GPUs of one node, with your own data.
#
#   DATA_PREFIX=my_text_document VOCAB_FILE=vocab.json MERGE_FILE=merges.txt \
#     bash examples/gpt/pretrain_gpt_345m.sh
#
# Options of the trainer may follow; they override the options below.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)

DATA_PREFIX=${DATA_PREFIX:?set it to the data path without .bin or .idx; see tools/preprocess_data.py}
VOCAB_FILE=${VOCAB_FILE:?set it to the path of vocab.json}
MERGE_FILE=${MERGE_FILE:?set it to the path of merges.txt}
RUN_DIR=${RUN_DIR:-$root/runs/gpt-345m}
NPROC_PER_NODE=${NPROC_PER_NODE:-2}
PIPELINE_PARALLEL=${PIPELINE_PARALLEL:-2}
MODEL_CHUNKS=${MODEL_CHUNKS:-2}

MODEL_ARGS=(
  --num-layers 24
  --hidden-size 1024
  --num-attention-heads 16
  --seq-length 1024
  --max-position-embeddings 1024
)

PARALLEL_ARGS=(
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size "$PIPELINE_PARALLEL"
  --pipeline-schedule adaptive
)
if ((MODEL_CHUNKS > 1)); then
  PARALLEL_ARGS+=(--num-virtual-stages-per-pipeline-rank "$MODEL_CHUNKS")
fi

TRAINING_ARGS=(
  --bf16
  --micro-batch-size 4
  --global-batch-size 64
  --train-iters 500000
  --lr 1.5e-4
  --min-lr 1.0e-5
  --lr-decay-style cosine
  --lr-decay-iters 320000
  --lr-warmup-fraction 0.01
  --weight-decay 0.01
  --clip-grad 1.0
)

DATA_ARGS=(
  --data-path "$DATA_PREFIX"
  --vocab-file "$VOCAB_FILE"
  --merge-file "$MERGE_FILE"
  --tokenizer-type GPT2BPETokenizer
  --split "949,50,1"
)

OUTPUT_ARGS=(
  --save "$RUN_DIR/checkpoints"
  --load "$RUN_DIR/checkpoints"
  --save-interval 10000
  --tensorboard-dir "$RUN_DIR/tensorboard"
  --trace-dir "$RUN_DIR/traces"
  --trace-interval 100
  --log-interval 100
  --log-throughput
  --eval-interval 1000
  --eval-iters 10
)

# In a single hardware queue, a message between stages could wait forever behind a collective of
# other ranks. 8 is CUDA's default. Overlapping expert-parallel communication needs more queues.
case " $* " in
  *" --overlap-moe-expert-parallel-comm "*) queues=32 ;;
  *) queues=8 ;;
esac
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-$queues}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

exec torchrun --standalone --nproc-per-node "$NPROC_PER_NODE" "$root/pretrain_gpt.py" \
  "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" \
  "${OUTPUT_ARGS[@]}" "$@"
