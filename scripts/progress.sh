# Shows the progress of the set-up: a line for each step and, on a terminal, a progress bar. The
# output of the commands goes to a file. prerequisite.sh sources this script.
# shellcheck shell=bash

step_log=/dev/null # file for the output of the commands
drawing=''         # process that draws the bar

# Sets the file for the output of the commands, and empties it.
log_steps_to() {
  mkdir -p -- "${1%/*}"
  step_log=$1
  : >"$step_log"
}

# Counts the packages that pip has fetched and chosen so far. The argument is the number of lines in
# the file before pip began.
count_packages() {
  awk -v begin="$1" 'NR > begin {
    if (/^ *Collecting /) chosen++
    if (/^ *(Downloading|Using cached) / && !/\.metadata/) fetched++
    if (/^Installing collected packages/) fetched = chosen
  } END { print fetched + 0, chosen + 0 }' "$step_log"
}

# Counts the compiled files of the extension, from the lines that setup.py prints.
count_files() {
  awk -v begin="$1" 'NR > begin && /: compiled [0-9]+ of [0-9]+ files$/ { done = $(NF - 3); all = $(NF - 1) }
    END { print done + 0, all + 0 }' "$step_log"
}

# Prints a step's line with its bar. Arguments: text, seconds so far, amount done, total amount.
draw_step() {
  local width=24 filled
  if (($4 == 0)); then
    printf '\r\033[K%s (%d s)' "$1" "$2" >&2
    return
  fi
  filled=$((width * $3 / $4))
  printf '\r\033[K%s [%s%s] %d of %d (%d s)' "$1" \
    "$(printf '%*s' "$filled" '' | tr ' ' '#')" "$(printf '%*s' $((width - filled)) '')" \
    "$3" "$4" "$2" >&2
}

# Draws a step's line twice a second until this script ends.
draw_until_ended() {
  local text=$1 counter=$2 begin=$3 start=$SECONDS done_now all
  while kill -0 $$ 2>/dev/null; do
    read -r done_now all < <("$counter" "$begin")
    draw_step "$text" $((SECONDS - start)) "$done_now" "$all"
    sleep 0.5
  done
}

stop_drawing() {
  if [[ -n $drawing ]]; then
    kill "$drawing" 2>/dev/null || true
    wait "$drawing" 2>/dev/null || true
    drawing=''
  fi
}

# Runs the command of a step and returns its status. If it fails, the end of its output is printed.
# Arguments: text that describes the step; function that counts its progress, or "-"; the command
# and its arguments. The function's argument is the current number of lines in the file.
run_step() {
  local text=$1 counter=$2 begin start=$SECONDS status=0
  shift 2
  if [[ $counter == - ]]; then counter=count_nothing; fi
  begin=$(wc -l <"$step_log")
  printf '%s: %s\n' "$text" "$*" >>"$step_log"
  if [[ -t 2 ]]; then
    # Run the command in the foreground, because a background command would ignore Ctrl-C.
    draw_until_ended "$text" "$counter" "$begin" &
    drawing=$!
  else
    printf '%s\n' "$text" >&2
  fi
  "$@" >>"$step_log" 2>&1 || status=$?
  stop_drawing
  if [[ -t 2 ]]; then
    printf '\r\033[K%s (%d s)\n' "$text" $((SECONDS - start)) >&2
  fi
  if ((status)); then
    printf 'failed; the last lines of %s:\n' "$step_log" >&2
    tail -n +$((begin + 1)) -- "$step_log" | tail -n 20 >&2
  fi
  return "$status"
}

count_nothing() { printf '0 0\n'; }
