#!/usr/bin/env bash
# Trains a small GPT in a pipeline of processes on this machine, after installing requirements.
#
#   bash run_single.sh --pipeline_parallel 2 --model_chunks 2
#   bash run_single.sh --help
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
python=$(bash "$root/prerequisite.sh" | tail -n 1)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m megatron.adaptive train single "$@"
