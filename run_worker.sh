#!/usr/bin/env bash
# Waits for the run that run_master.sh starts on another node, and joins the run.
#
#   bash run_worker.sh --master-addr ADDRESS
#   bash run_worker.sh --help
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
python=${PYTHON:-$(bash "$root/prerequisite.sh" | tail -n 1)}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m megatron.adaptive job node worker "$@"
