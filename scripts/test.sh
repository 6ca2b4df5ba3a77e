#!/usr/bin/env bash
# Runs the tests, setting up what they need: all but those with virtual machines, a Slurm cluster or
# sanitizers, and but jobs of more than about twenty seconds (marked "long") of whose kind a shorter one
# runs; with --all those too. Other arguments go to pytest, e.g. scripts/test.sh -k schedule; -m replaces
# the choice of this script.
# With two processors or more, three processes share the test files (-n 0 for one), for many tests wait
# most of their time: for a cluster to start, or a node to be missed; two where memory is short. Each
# file stays whole, since its tests share ranks, nodes or a browser.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

setup=--test
marks=(-m 'not (rdma_lab or slurm_lab or sanitizer or long)')
words=()
for word in "$@"; do
  if [[ $word == --all ]]; then
    setup=--all
    marks=()
  else
    words+=("$word")
  fi
done
python=$(bash prerequisite.sh "$setup" | tail -n 1)
processors=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)))')
share=()
if ((processors > 1)) && [[ " ${words[*]} " != *" -n "* ]]; then
  free_mib=$(awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)
  share=(-n $((free_mib < 12000 ? 2 : 3)) --dist loadfile --no-loadscope-reorder)
fi
# Ranks of a test share the machine: more threads per rank only get in each other's way.
export OMP_NUM_THREADS=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m pytest "${share[@]}" "${marks[@]}" "${words[@]}"
