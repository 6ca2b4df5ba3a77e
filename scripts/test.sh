#!/usr/bin/env bash
# Runs the tests, setting up what they need. Arguments go to pytest, e.g. scripts/test.sh -k schedule,
# or scripts/test.sh -n 2 --dist loadfile for two processes; each file has to stay whole then, since
# its tests share ranks, nodes or a browser.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

python=$(bash prerequisite.sh --test | tail -n 1)
# Ranks of a test share the machine: more threads per rank only get in each other's way.
export OMP_NUM_THREADS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m pytest "$@"
