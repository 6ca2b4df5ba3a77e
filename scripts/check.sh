#!/usr/bin/env bash
# Runs all checks except the tests: format, lint, types, imports, size, shell scripts, links of the
# documentation, and the C++ extension with and without RDMA. Exits with status 1 if any check
# failed.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

python=$(bash prerequisite.sh --test | tail -n 1)
tools=$(dirname -- "$python")
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# mypy's cache depends on the content of files, so checkouts can share it.
export MYPY_CACHE_DIR=${XDG_CACHE_HOME:-$HOME/.cache}/megatron-adaptive/mypy
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
failed=()

check() {
  local name=$1
  shift
  printf -- '--- %s\n' "$name"
  "$@" || failed+=("$name")
}

# Runs a tool that pip installed next to this Python, otherwise the tool on PATH.
tool() {
  local name=$1
  shift
  if [[ -x $tools/$name ]]; then "$tools/$name" "$@"; else "$name" "$@"; fi
}

# Lists the files of the project, without files that environments and builds leave in the folder.
files() { find . \( -path ./.venv -o -path ./build -o -path ./.git \) -prune -o -type f "$@" -print0; }

shell_scripts() {
  { files \( -name '*.sh' -o -name '*.sbatch' \) && printf '%s\0' ./.ci/run; } | tool_on_files shellcheck
}

cpp_format() {
  files \( -path './csrc/*.h' -o -path './csrc/*.cc' \) |
    tool_on_files clang-format --dry-run --Werror
}

tool_on_files() {
  local list=()
  mapfile -d '' list
  tool "$@" "${list[@]}"
}

# Builds the extension into a separate folder, so that the extension in use does not change. Uses
# the same flags as prerequisite.sh, so that the build can use cached objects.
extension() {
  local flags
  flags=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("CFLAGS"))')
  MEGATRON_ADAPTIVE_EXTENSION=1 MEGATRON_ADAPTIVE_RDMA=$1 CXXFLAGS="$flags -Werror" \
    "$python" setup.py -q build_ext --build-lib "$work/lib$1" --build-temp "$work/temp$1"
}

check 'ruff format' tool ruff format --check .
check 'ruff check' tool ruff check .
check 'mypy' tool mypy
check 'import-linter' tool lint-imports --no-logo
check 'size' "$python" scripts/size.py
check 'words' "$python" scripts/words.py
check 'shellcheck' shell_scripts
check 'clang-format' cpp_format
NO_MKDOCS_2_WARNING=1 check 'documentation as a site' tool mkdocs build --strict -q -d "$work/site"
check 'extension without RDMA' extension 0
if echo '#include <infiniband/verbs.h>' | "${CXX:-c++}" -x c++ -fsyntax-only - 2>/dev/null; then
  check 'extension with RDMA' extension 1
else
  printf -- '--- extension with RDMA: skipped, there is no infiniband/verbs.h (libibverbs-dev)\n'
fi

if ((${#failed[@]})); then
  printf -v list '%s, ' "${failed[@]}"
  printf 'failed: %s\n' "${list%, }"
  exit 1
fi
printf 'all checks passed\n'
