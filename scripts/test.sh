#!/usr/bin/env bash
# Runs the tests, setting up what they need. Arguments go to pytest, e.g. scripts/test.sh -k schedule.
# With two processors or more, two processes share the test files (-n 0 for one); each file stays
# whole, since its tests share ranks, nodes or a browser.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

python=$(bash prerequisite.sh --test | tail -n 1)
processors=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)))')
share=()
if ((processors > 1)) && [[ " $* " != *" -n "* ]]; then share=(-n 2 --dist loadfile --no-loadscope-reorder); fi
# Ranks of a test share the machine: more threads per rank only get in each other's way.
export OMP_NUM_THREADS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m pytest "${share[@]}" "$@"
