#!/usr/bin/env bash
# Trains GPT-2 XL, 1.5B parameters, in bfloat16 on the GPUs of one node, with your own data.
#
#   DATA_PREFIX=my_text_document VOCAB_FILE=vocab.json MERGE_FILE=merges.txt \
#     bash examples/gpt/pretrain_gpt_xl_1.5b.sh
#
# The script runs pretrain_gpt_345m.sh with a different model shape. Options of the trainer may
# follow; they override the options below.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)

export RUN_DIR=${RUN_DIR:-$root/runs/gpt-xl-1.5b}
export NPROC_PER_NODE=${NPROC_PER_NODE:-4}
export PIPELINE_PARALLEL=${PIPELINE_PARALLEL:-4}

exec bash "$root/examples/gpt/pretrain_gpt_345m.sh" \
  --num-layers 48 --hidden-size 1600 --num-attention-heads 25 --micro-batch-size 1 "$@"
