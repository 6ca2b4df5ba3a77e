#!/usr/bin/env bash
# Sets up the requirements of the tests, and runs the tests. Skips tests with virtual machines, a
# Slurm cluster or sanitizers. Also skips tests that are marked "long": most tests that take more
# than about five seconds, and additional cases of shorter tests. --all runs all of these. Other
# arguments are passed to pytest, for example scripts/test.sh -k schedule. With -m, only pytest
# selects the tests.
#
# With two processors or more, the test files are distributed over three processes (two if memory is
# low; use -n 0 for a single process). More processes than processors are useful because many tests
# mostly wait, for example for a cluster to start. The tests of a file run in one process, because
# they share ranks, nodes or a browser.
#
# --gpu-target runs tests of code that is used with GPUs, but without a GPU. The environment is like
# that of a GPU machine (prerequisite.sh --gpu-target). Afterwards, scripts/gpu_check.sh is
# rehearsed in this environment.
#
# --python VERSION, such as 3.12, runs the core tests in an environment with this Python, its torch
# and the newest supported release of megatron-core (prerequisite.sh --python VERSION).
#
# If files are given together with --gpu-target or --python, only these files run.
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
# Tests of the code that is used with GPUs: trainer, transports, staging, plug-in, extension.
beside_gpus=(
  tests/{training,gpt,engine,transport,plugin,checkpoint,data,gpu}
  tests/test_*.py tests/multiprocess/test_equivalence.py
)
# Tests of the code that depends on the releases of Python, torch and megatron-core.
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
  # pytest-xdist hangs after replacing a crashed process if it distributes whole files.
  share+=(--max-worker-restart 0)
fi
# The ranks of a test share the machine, so more threads per rank would only slow tests down.
export OMP_NUM_THREADS=1
# Without this, hundreds of processes would compile the package's modules again.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if ((gpu_target)) && [[ " ${words[*]} " != *" tests/"* ]]; then
  status=0
  "$python" -m pytest "${share[@]}" "${marks[@]}" "${words[@]}" "${beside_gpus[@]}" || status=$?
  # The time limits of the parts are for GPU machines, which usually have more processors.
  VIRTUAL_ENV=${python%/bin/python} bash scripts/gpu_check.sh --rehearse --minutes 30 || status=$?
  exit "$status"
fi
if ((other_python)) && [[ " ${words[*]} " != *" tests/"* ]]; then words+=("${core[@]}"); fi
exec "$python" -m pytest "${share[@]}" "${marks[@]}" "${words[@]}"
