#!/usr/bin/env bash
# Runs the tests, setting up what they need: all but those with virtual machines, a Slurm cluster or
# sanitizers, and but jobs of more than about twenty seconds (marked "long") of whose kind a shorter one
# runs; with --all those too. Other arguments go to pytest, e.g. scripts/test.sh -k schedule; -m replaces
# the choice of this script.
# With two processors or more, three processes share the test files (-n 0 for one), for many tests wait
# most of their time: for a cluster to start, or a node to be missed; two where memory is short. Each
# file stays whole, since its tests share ranks, nodes or a browser.
# With --gpu-target: what needs no GPU of the code that runs beside one, in an environment like that of
# a machine with GPUs (prerequisite.sh --gpu-target), then a rehearsal of scripts/gpu_check.sh there.
# With --python VERSION, such as 3.12: the suite's core in an environment with that Python, its torch and
# the newest supported release of megatron-core (prerequisite.sh --python VERSION).
# Where files are named too with one of the two, those alone.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

setup=(--test)
gpu_target=0
other_python=0
marks=(-m 'not (rdma_lab or slurm_lab or sanitizer or long)')
words=()
while (($#)); do
  word=$1
  shift
  if [[ $word == --all ]]; then
    setup=(--all)
    marks=()
  elif [[ $word == --gpu-target ]]; then
    setup=(--gpu-target)
    gpu_target=1
  elif [[ $word == --python ]]; then
    setup=(--python "${1:-}")
    other_python=1
    shift || true
  else
    words+=("$word")
  fi
done
# The code that runs beside a GPU: trainer, transports, staging, plug-in, extension.
beside_gpus=(
  tests/{training,gpt,engine,transport,plugin,checkpoint,data,gpu}
  tests/test_*.py tests/multiprocess/test_equivalence.py
)
# What depends on the releases of Python, torch and megatron-core.
core=(
  tests/{checkpoint,config,data,engine,gpt,modules,plugin,profiling,rebalance,schedule,trace,training}
  tests/{planner,transport} tests/test_*.py tests/multiprocess/test_equivalence.py
)
python=$(bash prerequisite.sh "${setup[@]}" | tail -n 1)
processors=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)))')
share=()
if ((processors > 1)) && [[ " ${words[*]} " != *" -n "* ]]; then
  free_mib=$(awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)
  share=(-n $((free_mib < 12000 ? 2 : 3)) --dist loadfile --no-loadscope-reorder)
  # With files kept whole, pytest-xdist waits for ever once it has replaced a process that was lost.
  share+=(--max-worker-restart 0)
fi
# Ranks of a test share the machine: more threads per rank only get in each other's way.
export OMP_NUM_THREADS=1
# Hundreds of processes would compile the package's modules anew where the environment says so.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if ((gpu_target)) && [[ " ${words[*]} " != *" tests/"* ]]; then
  status=0
  "$python" -m pytest "${share[@]}" "${marks[@]}" "${words[@]}" "${beside_gpus[@]}" || status=$?
  # Limits of parts are those of a machine with GPUs, which has more processors than most.
  VIRTUAL_ENV=${python%/bin/python} bash scripts/gpu_check.sh --rehearse --minutes 30 || status=$?
  exit "$status"
fi
if ((other_python)) && [[ " ${words[*]} " != *" tests/"* ]]; then words+=("${core[@]}"); fi
exec "$python" -m pytest "${share[@]}" "${marks[@]}" "${words[@]}"
