#!/usr/bin/env bash
# A shell on a node with its GPUs, to try things in; torchrun --standalone uses that node alone.
#
#   bash examples/slurm/interactive.sh [options of srun]
set -euo pipefail
exec srun --nodes=1 --ntasks=1 --gpus-per-node="${GPUS:-1}" "$@" --pty bash
