#!/usr/bin/env bash
# Opens a shell on a node with GPUs, for experiments. torchrun --standalone uses only this node.
#
#   bash examples/slurm/interactive.sh [options of srun]
set -euo pipefail
exec srun --nodes=1 --ntasks=1 --gpus-per-node="${GPUS:-1}" "$@" --pty bash
