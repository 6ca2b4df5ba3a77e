#!/usr/bin/env bash
# Starts the run described in conf.sh on this node, and waits for the other nodes.
#
#   bash run_master.sh [conf.sh]
#   bash run_master.sh --help
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
python=${PYTHON:-$(bash "$root/prerequisite.sh" | tail -n 1)}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m megatron.adaptive job node master "$@"
