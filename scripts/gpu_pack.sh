#!/usr/bin/env bash
# Packs the files that a GPU machine without a network needs for scripts/gpu_check.sh: wheels, and
# the C++ extension for its Python. Prints the command to run there, in a copy of this checkout.
#
#   scripts/gpu_pack.sh [--python PYTHON] [--installed FILE] [FOLDER]
#
# FOLDER is build/gpu-pack by default. PYTHON is a Python with the machine's version and this
# project's requirements; the default is the Python of prerequisite.sh --gpu-target. FILE is the
# output of `python3 -m pip freeze` on the machine; without it, the script assumes that all packages
# except megatron-core, plotly, openpyxl and nvidia-ml-py are installed there.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# Prints a digest of the extension's sources.
digest() {
  {
    sha256sum setup.py
    find csrc -type f -not -path 'csrc/tests/*' \( -name '*.h' -o -name '*.cc' \) -print0 |
      LC_ALL=C sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d' ' -f1
}

folder=build/gpu-pack
python=
installed=
while (($#)); do
  case $1 in
    --digest)
      digest
      exit
      ;;
    --python | --installed)
      (($# > 1)) || fail "$1 needs a path"
      if [[ $1 == --python ]]; then python=$2; else installed=$2; fi
      shift
      ;;
    -*) fail "unknown option '$1'; use --python PYTHON or --installed FILE" ;;
    *) folder=$1 ;;
  esac
  shift
done
if [[ -z $python ]]; then
  python=$(bash prerequisite.sh --gpu-target --print-python)
  [[ -x $python ]] || fail "$python does not exist; run bash prerequisite.sh --gpu-target, or use --python PYTHON"
fi
"$python" -c 'import pybind11, setuptools' 2>/dev/null ||
  fail "--python $python cannot import pybind11 and setuptools, which build the extension; install them there"
[[ -z $installed || -r $installed ]] || fail "--installed $installed is not a readable file"

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
mkdir -p -- "$work/pack/wheels" "$work/pack/extension"
"$python" scripts/pack_wheels.py "$work/pack/wheels" ${installed:+"$installed"} >&2
# The machine does not need debugging symbols, and its libstdc++ may be older.
LDFLAGS="-Wl,--strip-all -static-libstdc++ -static-libgcc ${LDFLAGS:-}" MEGATRON_ADAPTIVE_EXTENSION=1 \
  "$python" setup.py -q build_ext --build-lib "$work/lib" --build-temp "$work/temp" >&2
cp -- "$work"/lib/megatron/adaptive/_C*.so "$work/pack/extension/"
digest >"$work/pack/sources.sha256"
# The copy of the checkout may not have the git history.
git describe --always --dirty --abbrev=12 >"$work/pack/commit" 2>/dev/null || rm -f -- "$work/pack/commit"
rm -rf -- "$folder"
mkdir -p -- "$(dirname -- "$folder")"
mv -- "$work/pack" "$folder"
printf '%s: %s MiB\n' "$folder" "$(du -sm -- "$folder" | cut -f1)"
printf 'copy this checkout and this folder to the machine, and run: bash scripts/gpu_check.sh --pack %s\n' "$folder"
