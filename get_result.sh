#!/usr/bin/env bash
# Shows a job's state, iterations and errors, and the resources that each node uses.
#
#   bash get_result.sh JOB [--follow] [--json] [--log-dir DIR]
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
python=${PYTHON:-$(bash "$root/prerequisite.sh" --print-python | tail -n 1)}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m megatron.adaptive job status "$@"
