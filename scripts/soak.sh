#!/usr/bin/env bash
# Runs the full soak tests of tests/soak one after another. Prints a line for each soak test, with
# the result, the duration in seconds and the last line of its output. The whole output is in
# build/soak/NAME.log.
#
#   scripts/soak.sh [--quick] [NAME ...]
#
# --quick runs short versions. The names and time limits are in the table below; all soak tests
# together take at most 39 hours. "features" needs a checkout of Megatron-LM, whose path is in the
# variable MEGATRON_LM. Exits with status 1 if a soak test missed a goal, failed, or exceeded its
# time limit. The test suite (scripts/test.sh --all) also runs the short versions.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# Columns: name, time limit in minutes, module and arguments.
table='
commands        30   tests.soak.faults --part commands
secrets         30   tests.soak.faults --part secrets
leases         120   tests.soak.faults --part leases
control         60   tests.soak.faults --part control
damages         90   tests.soak.faults --part damages
strangers       60   tests.soak.faults --part strangers
interrupts     240   tests.soak.faults --part interrupts
hangs          600   tests.soak.faults --part hangs --beside 4
nodes           90   tests.soak.faults --part soak
morphs          60   tests.soak.elastic --part morphs start copies
repartition     60   tests.soak.elastic --part repartition pieces
diagnosis       90   tests.soak.diagnosis
causes         120   tests.soak.causes
noise           90   tests.soak.noisy_jobs
kills           90   tests.soak.killed_ranks
messages        60   tests.soak.message_stream
monitor         30   tests.soak.monitor
tried           60   tests.soak.tried_ranks
starts          30   tests.soak.starts
tokens          60   tests.soak.tokens
rdma            60   tests.labs.rdma_speed
slurm           60   tests.soak.slurm_jobs
features       120   tests.soak.feature_sets
flags           30   tests.soak.trainer_flags
'

quick=()
chosen=()
for word in "$@"; do
  if [[ $word == --quick ]]; then
    quick=(--quick)
  elif grep -q -- "^$word " <<<"$table"; then
    chosen+=("$word")
  else
    printf 'error: unknown soak test %s; the soak tests are %s\n' "$word" \
      "$(awk 'NF { printf "%s%s", separator, $1; separator = ", " }' <<<"$table")" >&2
    exit 2
  fi
done

python=$(bash prerequisite.sh --test | tail -n 1)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
mkdir -p build/soak
failed=0
while read -r name minutes module arguments; do
  [[ -n $name ]] || continue
  if ((${#chosen[@]})) && [[ " ${chosen[*]} " != *" $name "* ]]; then continue; fi
  read -ra words <<<"$arguments"
  log=build/soak/$name.log
  begin=$SECONDS
  status=0
  # Send SIGTERM first, so that a soak test can shut down its nodes and their namespaces.
  timeout --kill-after=60 "$((60 * minutes))" "$python" -m "$module" "${words[@]}" "${quick[@]}" \
    >"$log" 2>&1 </dev/null || status=$?
  case $status in
    0) result=ok ;;
    124 | 137) result="FAILED, exceeded $minutes minutes" ;;
    *) result=FAILED ;;
  esac
  if ((status)); then failed=1; fi
  printf '%-12s %s, %d s: %s\n' "$name" "$result" "$((SECONDS - begin))" "$(tail -n 1 "$log")"
done <<<"$table"
exit "$failed"
