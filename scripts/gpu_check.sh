#!/usr/bin/env bash
# Runs all checks that need a GPU within a few minutes. Writes a page and a JSON file that list
# which checks ran, failed and were skipped.
#
#   scripts/gpu_check.sh [--minutes 10] [--parts NAME ...] [--output FOLDER] [--pack FOLDER]
#                        [--rehearse]
#
# --rehearse runs the same checks without a GPU. docs/gpu_check.md describes the parts.
# Without a network, copy the folder that scripts/gpu_pack.sh creates to the machine and pass it
# with --pack. Packages that cannot be installed are listed by name.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$*" >&2; }

# Prints the path of the Python to use as the last line. If the usual set-up fails, installs as many
# packages as possible into a separate folder, so that the environment with torch does not change.
set_up() {
  local python site=$PWD/build/gpu-check-site requirement
  export PIP_RETRIES=${PIP_RETRIES:-0} PIP_DEFAULT_TIMEOUT=${PIP_DEFAULT_TIMEOUT:-15}
  if [[ -n ${1:-} ]]; then take_pack "$1"; fi
  if ! python=$(bash prerequisite.sh | tail -n 1) || [[ ! -x $python ]]; then
    say "prerequisite.sh failed; continuing with the installed packages"
    python=$(usable_python)
    while IFS= read -r requirement; do
      install "$python" "$site" "$requirement"
    done < <("$python" scripts/environment.py | sed -n -E 's/^(missing|tool)=//p')
    if [[ ${MEGATRON_ADAPTIVE_EXTENSION:-auto} != 0 ]]; then
      build_extension "$python" "$site" >&2 || say "not installed: the C++ extension"
    fi
  fi
  if ! PYTHONPATH=$site "$python" -c 'import pytest' 2>/dev/null; then
    install "$python" "$site" "$(grep '^pytest==' requirements-test.txt)"
  fi
  printf '%s\n' "$python"
}

# Prints the path of the Python that prerequisite.sh uses. If it lacks torch, prints another one that
# has torch, because torch is too large to install here. prerequisite.sh does not use a virtual
# environment whose folder is read-only.
usable_python() {
  local first candidate
  first=$(bash prerequisite.sh --print-python || true)
  for candidate in "$first" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" python3 python; do
    candidate=$(command -v "${candidate:-python3}" || true)
    if [[ -x $candidate ]] &&
      "$candidate" -c 'import importlib.util as u; raise SystemExit(u.find_spec("torch") is None)'; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  if [[ -x $first ]]; then printf '%s\n' "$first"; else command -v python3; fi
}

# Makes pip use only the folder of scripts/gpu_pack.sh, and takes the extension from there if it was
# built from these sources and fits the Python that is used.
take_pack() {
  local pack python
  pack=$(cd -- "$1" && pwd -P)
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=$pack/wheels
  # Ignore the pip settings of this machine, which may refer to a network.
  export PIP_CONFIG_FILE=/dev/null PIP_CONSTRAINT=
  python=$(usable_python)
  if [[ $(cat -- "$pack/sources.sha256") != "$(bash scripts/gpu_pack.sh --digest)" ]]; then
    say "the extension in $pack was built from other sources; building it here"
    return
  fi
  cp -- "$pack"/extension/_C*.so megatron/adaptive/
  if [[ -x $python ]] && PYTHONPATH=$PWD "$python" -c '
import sys
from megatron.adaptive import extension
sys.exit(extension.why_missing())' >&2; then
    export MEGATRON_ADAPTIVE_EXTENSION=0 # prerequisite.sh does not need to build the extension
  fi
}

# Builds the C++ extension, even with a setuptools that is too old to read pyproject.toml.
build_extension() {
  local folder=$PWD/build/gpu-check-extension
  rm -rf -- "$folder"
  mkdir -p -- "$folder"
  ln -s -- "$PWD/csrc" "$PWD/setup.py" "$folder"
  (cd -- "$folder" && PYTHONPATH=$2 "$1" setup.py -q build_ext --build-lib lib) &&
    cp -- "$folder"/lib/megatron/adaptive/_C*.so megatron/adaptive/
}

# Installs one package without its dependencies, because these are in the list too.
install() {
  "$1" -m pip install -q --disable-pip-version-check --no-deps --upgrade --target "$2" "$3" >&2 ||
    say "not installed: $3"
}

if [[ ${1:-} == --set-up ]]; then
  set_up "${2:-}"
  exit
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$(command -v python3)" -m gpu_check "$@"
