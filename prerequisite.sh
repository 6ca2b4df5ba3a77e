#!/usr/bin/env bash
# Sets up the requirements of this project. The last line on stdout is the Python to use; all other
# output goes to stderr. Safe to run repeatedly: if everything is set up, a call takes about a third
# of a second.
#
#   If the active Python (virtual environment, conda, plain) has a usable torch:
#       That Python is used. Missing packages are added, and installed packages do not change.
#   If it has torch, but pip cannot add packages, or an installed version is not supported:
#       A .venv is created in this checkout, on top of that Python if possible.
#   Otherwise:
#       A .venv with all requirements is created in this checkout.
#
# --gpu-target creates an environment like that of a machine with GPUs, and --python VERSION an
# environment with another Python. Both are outside of this checkout.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: prerequisite.sh [--test] [--rdma] [--views] [--lab] [--slurm] [--versions] [--all]
                       [--benchmarks] [--examples] [--print-python]
       prerequisite.sh --gpu-target | --python VERSION [--print-python]

  --test          also install the requirements of scripts/test.sh and scripts/check.sh
  --rdma          also install the system packages for RDMA (libibverbs-dev, ibverbs-providers,
                  rdma-core, ibverbs-utils, perftest)
  --views         also install the programs with which tests open trace views: LibreOffice Calc
                  without its user interface, Chromium and its driver (Debian 12)
  --lab           also install the system packages for tests/labs: the packages of the nodes, of the
                  compiler for their kernel, and QEMU for nodes with sanitizers (Debian 12)
  --slurm         also install the system packages of the Slurm cluster in tests/labs; their
                  services are not started (Debian 12)
  --versions      also unpack the other releases of megatron-core that the plug-in is tested with in
                  build/megatron-core, outside of the environment (700 MB, mostly triton)
  --all           same as --test --rdma --views --lab --slurm --versions: the requirements of
                  scripts/test.sh --all
  --benchmarks    also install Open MPI with UCX and mpi4py, which benchmarks/transport.py compares
                  with
  --examples      also install transformers and PEFT for examples/cutpoint and examples/finetune
                  (included in --test)
  --gpu-target    create an environment like that of a machine with GPUs, for
                  scripts/test.sh --gpu-target: Python 3.12, torch 2.11.0 with CUDA 13.0, and the
                  packages of --test. No GPU is needed. All checkouts share the environment (7 GB) in
                  ~/.cache/megatron-adaptive/gpu-target (or XDG_CACHE_HOME).
  --python VERSION
                  create an environment with this Python, such as 3.12, for
                  scripts/test.sh --python VERSION: its torch, the newest supported release of
                  megatron-core, and the packages of --test. All checkouts share the environment
                  (about 7 GB) in ~/.cache/megatron-adaptive/python-VERSION.
  --print-python  only print the Python that is or would be used, without any set-up
TEXT
}

say() { printf '%s\n' "$*" >&2; }
fail() {
  say "error: $*"
  exit 2
}

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
cd -- "$root"
# shellcheck source=scripts/progress.sh
source scripts/progress.sh
venv=$root/.venv
cache=${XDG_CACHE_HOME:-${HOME:-$root/build}/.cache}/megatron-adaptive
declare -A asked=(
  [test]=0 [rdma]=0 [views]=0 [lab]=0 [slurm]=0 [versions]=0 [benchmarks]=0 [examples]=0
)
print_only=0
gpu_target=0
wanted_python=''
while (($#)); do
  argument=$1
  shift
  case $argument in
    --test | --rdma | --views | --lab | --slurm | --versions | --benchmarks | --examples)
      asked[${argument#--}]=1
      ;;
    --all) for part in test rdma views lab slurm versions; do asked[$part]=1; done ;;
    --gpu-target) gpu_target=1 ;;
    --python)
      wanted_python=${1:-}
      [[ $wanted_python =~ ^3\.[0-9]+$ ]] ||
        fail "--python must be a version of two numbers, such as 3.12, got '$wanted_python'"
      ((${wanted_python#3.} >= 10)) ||
        fail "--python must be 3.10 or newer, got $wanted_python"
      shift
      ;;
    --print-python) print_only=1 ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      fail "unknown argument '$argument'"
      ;;
  esac
done

declare -A packages=(
  [rdma]='libibverbs-dev ibverbs-providers rdma-core ibverbs-utils perftest'
  [views]='libreoffice-calc-nogui chromium chromium-driver'
  [lab]='ibverbs-providers ibverbs-utils iproute2 perftest python3-pyverbs
    linux-source-6.12 bc bison flex gcc libc6-dev make xz-utils
    qemu-system-x86 busybox-static cpio kmod'
  [slurm]='slurmctld slurmd slurm-client slurmdbd mariadb-server-core munge iproute2 util-linux
    openssh-client openssh-server'
  [benchmarks]='openmpi-bin'
)
declare -A lost=(
  [rdma]='the extension lacks RDMA, or RDMA cannot be measured'
  [views]='tests that open a workbook or a page are skipped'
  [lab]='tests in tests/labs are skipped'
  [slurm]='tests on a Slurm cluster are skipped'
  [benchmarks]='benchmarks/transport.py does not compare with MPI and UCX'
)
# Each package is unpacked into a separate folder. Releases of megatron-core since 0.18 import
# triton, and the last package provides the optimizer muon.
core_versions=(
  megatron-core==0.15.3 megatron-core==0.17.1 megatron-core==0.18.2 megatron-core==0.19.2
  triton==3.9.0 emerging-optimizers==0.3.0
)
core_folder=$root/build/megatron-core
newest_core=megatron-core==0.19.2
muon=${core_versions[-1]}

# ---- selection of the Python

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# Prints the Python that the command python starts, if it is new enough.
active_python() {
  local candidate
  for candidate in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" \
    "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}" python python3; do
    if [[ -n $candidate ]] && command -v "$candidate" >/dev/null && new_enough "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
}

# Prints a Python from which a virtual environment can be created.
any_python() {
  local candidate path
  for candidate in "$@" python3 python3.13 python3.12 python3.11 python3.10 /usr/bin/python3; do
    path=$(command -v "$candidate") || continue
    # Skip the environment that is about to be replaced.
    if [[ $path != "$venv/"* ]] && new_enough "$path"; then
      printf '%s\n' "$path"
      return
    fi
  done
}

# Sets facts (a value per key) and the lists missing, keep, tool and conflict for a Python.
declare -A facts=()
missing=() keep=() tool=() conflict=()
look_at() {
  local answer key value flags=()
  missing=() keep=() tool=() conflict=()
  for key in test benchmarks examples; do
    if ((asked[$key])); then flags+=("--$key"); fi
  done
  # An environment created by this project must have the pinned versions, not just supported ones.
  if [[ $1 == "$venv/"* ]] &&
    ! grep -qsi 'include-system-site-packages *= *true' "$venv/pyvenv.cfg"; then
    flags+=(--exact)
  fi
  answer=$("$1" scripts/environment.py "${flags[@]}") || fail "$1 cannot run scripts/environment.py"
  while IFS='=' read -r key value; do
    case $key in
      missing) missing+=("$value") ;;
      keep) keep+=("$value") ;;
      tool) tool+=("$value") ;;
      conflict) conflict+=("$value") ;;
      *) facts[$key]=$value ;;
    esac
  done <<<"$answer"
  if [[ $1 == "$venv/"* ]]; then
    missing+=("${tool[@]}")
    tool=()
  fi
}

# Sets python, or leaves it empty if .venv must be created first. Sets base to the Python from which
# .venv is created.
python='' base='' on_top=0
choose_python() {
  local active
  active=$(active_python)
  if [[ -n $active ]]; then
    look_at "$active"
    if ((facts[torch] && facts[installable] && ${#conflict[@]} == 0)); then
      python=${facts[executable]}
      return
    fi
    if ((facts[torch] && !facts[venv] && ${#conflict[@]} == 0)); then
      on_top=1
    elif ((facts[torch])); then
      say "not using ${facts[executable]}: ${conflict[*]:-it has no pip, or pip cannot add packages to it}"
    fi
    base=${facts[executable]}
  fi
  if [[ -x $venv/bin/python ]] && "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    python=$venv/bin/python
    look_at "$python"
    facts[executable]=$python
  fi
}

# ---- earlier set-ups

# Prints a digest of everything that the set-up depends on.
fingerprint() {
  local header=absent
  if [[ -e /usr/include/infiniband/verbs.h ]]; then header=present; fi
  {
    printf '%s\n' "$root" "$python" "${facts[version]}" "$header" "${CXX:-}" \
      "${packages[@]}" "${MEGATRON_ADAPTIVE_EXTENSION:-}" "${MEGATRON_ADAPTIVE_RDMA:-}"
    command -v c++ g++ || true
    sha256sum requirements.txt requirements-gpu.txt requirements-test.txt \
      requirements-benchmarks.txt requirements-examples.txt
    sha256sum pyproject.toml setup.py
    find csrc -type f \( -name '*.h' -o -name '*.cc' \) -print0 | sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d' ' -f1
}

# Prints the path of this checkout's stamp, which is inside the environment, so that it is removed
# together with the environment.
stamp_path() {
  printf '%s/.megatron-adaptive-%s\n' "${facts[prefix]}" \
    "$(printf '%s' "$root" | sha256sum | cut -c1-12)"
}

missing_versions() {
  local pin
  for pin in "${core_versions[@]}"; do
    if [[ ! -d $core_folder/$pin ]]; then printf '%s\n' "$pin"; fi
  done
}

is_set_up() {
  local stamp key value
  ((${#missing[@]} == 0)) || return 1
  if ((asked[versions])) && [[ -n $(missing_versions) ]]; then return 1; fi
  stamp=$(stamp_path)
  [[ -r $stamp ]] || return 1
  declare -A fields=()
  while IFS='=' read -r key value; do
    if [[ -n $key ]]; then fields[$key]=$value; fi
  done <"$stamp"
  [[ ${fields[fingerprint]:-} == "$(fingerprint)" ]] || return 1
  for key in "${!packages[@]}"; do
    ((asked[$key] <= ${fields[$key]:-0})) || return 1
  done
  [[ -z ${fields[extension]:-} || -e ${fields[extension]} ]]
}

# ---- system packages

# Installs Debian packages if that is allowed, or prints how to install them and returns status 1.
install_packages() {
  local prefix=()
  if ! command -v apt-get >/dev/null; then
    say "not installed: $* (this is not Debian; install the equivalent packages)"
    return 1
  fi
  if ((EUID != 0)); then
    if ! sudo -n true 2>/dev/null; then
      say "not installed: $*; run: sudo apt-get install -y $*"
      return 1
    fi
    prefix=(sudo -n)
  fi
  run_step 'updating the list of system packages' - "${prefix[@]}" apt-get update -qq ||
    say "warning: apt-get update failed; continuing"
  run_step "installing system packages: $*" - "${prefix[@]}" \
    env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

package_installed() {
  [[ $(dpkg-query -W -f '${Status}' "$1" 2>/dev/null) == 'install ok installed' ]]
}

# Installs the missing packages of a part, such as lab.
install_part() {
  local package policy=/usr/sbin/policy-rc.d own=0 wanted=()
  for package in ${packages[$1]}; do
    if ! package_installed "$package"; then wanted+=("$package"); fi
  done
  if ((${#wanted[@]} == 0)); then return; fi
  # Labs start their own services, so this policy prevents Debian's scripts from starting services
  # on this machine.
  if [[ ! -e $policy && -w ${policy%/*} ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    own=1
  fi
  install_packages "${wanted[@]}" || say "warning: without these packages ${lost[$1]}"
  if ((own)); then rm -f -- "$policy"; fi
}

# Installs the compiler for the extension. Failures are not fatal, because everything else works
# without the extension.
install_compiler() {
  local wanted=() header compiler=${CXX:-c++}
  if ! command -v "${compiler%% *}" g++ >/dev/null; then wanted+=(g++); fi
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  if [[ ! -e $header && $header == /usr/include/* ]]; then wanted+=(python3-dev); fi
  if ((${#wanted[@]})); then
    install_packages "${wanted[@]}" || say "warning: without these packages the C++ extension is not built"
  fi
}

# ---- environments of other checkouts

# Environments are kept for two weeks, because only this project's own requirements are pinned.
kept_environments=$cache/environments
kept_days=14

# Prints the folder of kept environments that are equal to the environment to be created from base.
kept_environment() {
  local key
  key=$({
    printf '%s\n' "${asked[test]}" "${asked[benchmarks]}" "${asked[examples]}" "${PIP_INDEX_URL:-}" "${PIP_EXTRA_INDEX_URL:-}"
    "$base" -c 'import os, sys; print(sys.version, os.path.realpath(sys.executable))'
    uname -m
    if [[ -e /dev/nvidiactl ]]; then echo gpu; fi
    cat requirements.txt requirements-gpu.txt requirements-test.txt requirements-benchmarks.txt \
      requirements-examples.txt scripts/environment.py
  } | sha256sum | cut -c1-24)
  printf '%s/%s\n' "$kept_environments" "$key"
}

# Links the files of an environment to another folder (or copies them to another file system), and
# replaces its path in programs. Arguments: source folder, target folder, new path.
link_environment() {
  local old file
  cp -al -- "$1" "$2" 2>/dev/null || { rm -rf -- "$2" && cp -a -- "$1" "$2"; } || return 1
  old=$(cat -- "$1/.path" 2>/dev/null || printf '%s\n' "$1")
  rm -f -- "$2/.path"
  # sed creates new files, so the files of the other environment do not change.
  while IFS= read -r -d '' file; do
    sed -i -e "s|$old|$3|g" -- "$file" || return 1
  done < <(grep -rlIZ -F -- "$old" "$2/bin" "$2/pyvenv.cfg")
}

# Uses the packages of another checkout's environment, or returns status 1 if there is none.
take_environment() {
  local kept fresh=$venv.$$.new
  # Skip environments whose paths contain characters that are special in sed expressions.
  [[ $on_top == 0 && $venv =~ ^[A-Za-z0-9_./-]+$ ]] || return 1
  kept=$(kept_environment)
  find "$kept_environments" -mindepth 1 -maxdepth 1 -mtime "+$kept_days" -exec rm -rf -- {} + \
    2>/dev/null || true
  [[ -x $kept/bin/python ]] || return 1
  say "using the packages of $kept"
  if ! link_environment "$kept" "$fresh" "$venv" || ! "$fresh/bin/python" -c 'import pip'; then
    rm -rf -- "$fresh"
    return 1
  fi
  rm -rf -- "$venv"
  mv -T -- "$fresh" "$venv"
}

# Stores the packages of a newly created environment for other checkouts.
keep_environment() {
  local kept fresh
  [[ $venv =~ ^[A-Za-z0-9_./-]+$ ]] || return 0
  kept=$(kept_environment)
  fresh=$kept.$$.new
  if [[ -e $kept ]] || ! mkdir -p -- "$kept_environments" 2>/dev/null; then return; fi
  if link_environment "$venv" "$fresh" "$venv" && printf '%s\n' "$venv" >"$fresh/.path" &&
    mv -T -- "$fresh" "$kept" 2>/dev/null; then
    touch -- "$kept"
  else
    rm -rf -- "$fresh"
  fi
}

made=0
make_venv() {
  local flags=()
  base=$(any_python "$base")
  if [[ -z $base ]]; then
    install_packages python3 python3-venv python3-dev ||
      fail "no Python 3.10 or newer was found; install Python, or activate an environment that has it"
    base=$(any_python)
  fi
  if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
    install_packages python3-venv || fail "$base cannot create a virtual environment"
  fi
  if ! take_environment; then
    if ((on_top)); then flags+=(--system-site-packages); else made=1; fi
    run_step "creating the virtual environment $venv with $base" - \
      "$base" -m venv --clear "${flags[@]}" "$venv" || fail "$base could not create $venv"
  fi
  python=$venv/bin/python
  look_at "$python"
  facts[executable]=$python
}

# ---- Python packages and the extension

work=''
trap 'stop_drawing; if [[ -n $work ]]; then rm -rf -- "$work"; fi' EXIT

# Installs packages as a step of the set-up. Arguments: description of the step, pip's arguments.
pip_step() {
  local text=$1
  shift
  run_step "$text" count_packages \
    "$python" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@"
}

install_requirements() {
  if ((${#missing[@]} == 0)); then return; fi
  printf '%s\n' "${missing[@]}" >"$work/missing.txt"
  : >"$work/keep.txt"
  # Packages may be replaced only in an environment created by this project.
  if ((${#keep[@]})); then printf '%s\n' "${keep[@]}" >"$work/keep.txt"; fi
  pip_step "installing Python packages into ${facts[prefix]}" \
    -r "$work/missing.txt" -c "$work/keep.txt" ||
    fail "pip could not install ${missing[*]} into ${facts[prefix]}"
}

# The packages declare that they need Python 3.12, but they also work with older versions.
install_versions() {
  local pin fresh
  # Avoid importing megatron-core, because the import takes seconds.
  local find_helper='from importlib.metadata import files
for file in files("megatron-core"):
    if file.name.startswith("helpers_cpp") and file.suffix == ".so":
        print(file.locate())'
  mkdir -p -- "$core_folder"
  for pin in $(missing_versions); do
    fresh=$work/$pin
    if [[ $pin != triton* ]]; then
      pip_step "unpacking $pin under $core_folder" --no-deps --target "$fresh" \
        --python-version 3.12 --only-binary :all: --ignore-requires-python "$pin"
    else
      pip_step "unpacking $pin under $core_folder" --no-deps --target "$fresh" "$pin" &&
        rm -rf -- "$fresh"/triton/backends/*/bin "$fresh"/triton/backends/*/lib
    fi || {
      say "warning: pip could not download $pin; tests that need it are skipped"
      continue
    }
    # The compiled helper of these releases is for Python 3.12. Use the helper of the environment
    # instead, which has the same source and is compiled for this Python.
    if [[ -d $fresh/megatron/core/datasets ]]; then
      cp -n -- "$("$python" -c "$find_helper")" "$fresh/megatron/core/datasets/" || true
    fi
    rm -rf -- "$core_folder/$pin.new"
    mv -- "$fresh" "$core_folder/$pin.new"
    mv -T -- "$core_folder/$pin.new" "$core_folder/$pin"
  done
}

extension_file() {
  PYTHONPATH=$root "$python" - <<'PYTHON'
from megatron.adaptive import extension

module = extension.load()
print(module.__file__ if module else "reason: " + str(extension.why_missing()))
PYTHON
}

build_extension() {
  local found path=$root
  # Do not change outdated build tools in an environment that this project did not create.
  if ((${#tool[@]})); then
    pip_step "downloading ${tool[*]} for the build" --target "$work/tools" "${tool[@]}" ||
      say "warning: pip could not download ${tool[*]}"
    path=$work/tools:$root
  fi
  PYTHONPATH=$path run_step 'building the C++ extension' count_files \
    "$python" setup.py -q build_ext --inplace || true
  found=$(extension_file)
  if [[ $found == reason:* ]]; then
    say "warning: the C++ extension is missing, but everything else works (${found#reason: });" \
      "see $step_log"
    found=''
  fi
  extension=$found
}

# Makes `import megatron.adaptive` work from every folder, if this project created the environment.
install_checkout() {
  if [[ $python != "$venv/"* ]]; then return; fi
  MEGATRON_ADAPTIVE_EXTENSION=0 pip_step 'installing this checkout' \
    --no-deps --no-build-isolation -e . ||
    say "warning: the checkout could not be installed; its programs work only from its folder"
}

set_up() {
  local now part
  work=$(mktemp -d)
  log_steps_to "$root/build/prerequisite.log"
  if [[ -z $python ]]; then make_venv; fi
  for part in "${!packages[@]}"; do
    if ((asked[$part])); then install_part "$part"; fi
  done
  if [[ ${MEGATRON_ADAPTIVE_EXTENSION:-auto} != 0 ]]; then install_compiler; fi
  # Remove the stamp first, so that an interrupted set-up does not look complete.
  rm -f -- "$(stamp_path)"
  install_requirements
  if ((asked[versions])); then install_versions; fi
  if ((made)); then keep_environment; fi
  look_at "$python"
  facts[executable]=$python
  build_extension
  install_checkout
  now=$(fingerprint)
  {
    printf '%s\n' "fingerprint=$now" "extension=$extension"
    for part in "${!packages[@]}"; do printf '%s=%s\n' "$part" "${asked[$part]}"; done
  } >"$(stamp_path)"
}

# ---- environments outside of the checkout, for machines with GPUs and for other Pythons

# Prints a Python of a version, or nothing if there is none.
python_of_version() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$1".*/bin/python; do
    # pyenv's shim exists even if another version is selected, but then it fails.
    if "$candidate" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
}

# Creates an environment that contains only torch.
make_target() {
  local from
  if [[ $(cat -- "$target/.torch" 2>/dev/null) == "$target_torch" ]]; then return; fi
  from=$(python_of_version "$target_version")
  [[ -n $from ]] ||
    fail "$option: Python $target_version is not installed; install it with pyenv install $target_version, or Debian's python$target_version-venv"
  log_steps_to "$root/build/prerequisite.log"
  run_step "creating the environment $target with $from" - "$from" -m venv "$target" ||
    fail "$option: $from could not create $target"
  python=$target/bin/python
  pip_step "installing $target_torch (several GB)" "$target_torch" || fail "$option: pip could not install $target_torch into $target"
  if ((gpu_target)); then
    "$python" -c 'import sys, torch; sys.exit(torch.version.cuda != "13.0")' ||
      fail "$option: the installed $target_torch is not for CUDA 13.0; use another package index"
  fi
  printf '%s\n' "$target_torch" >"$target/.torch"
}

# Installs the newest supported release of megatron-core, even if its wheel requires a newer Python.
install_newest_core() {
  local site helper
  python=$target/bin/python
  log_steps_to "$root/build/prerequisite.log"
  if ((${target_version#3.} >= 12)) && [[ ! -e $target/.tried-muon ]]; then
    pip_step "installing $muon" "$muon" || say "warning: pip could not install $muon; tests with muon are skipped"
    touch "$target/.tried-muon"  # without a network, pip tries for a minute
  fi
  if "$python" -m pip show "${newest_core%%=*}" 2>/dev/null | grep -qx "Version: ${newest_core##*=}"; then
    return
  fi
  if pip_step "installing $newest_core" "$newest_core"; then return; fi
  work=$(mktemp -d)
  # Use the compiled helper of the pinned release, whose wheel supports this Python.
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  if ! pip_step "downloading a helper for $newest_core" --no-deps --target "$work/pinned" \
    "$(grep '^megatron-core==' requirements.txt)" ||
    ! pip_step "unpacking $newest_core" --no-deps --target "$site" --python-version 3.12 \
      --only-binary :all: --ignore-requires-python "$newest_core"; then
    fail "$option: pip could not install $newest_core into $target"
  fi
  for helper in "$work"/pinned/megatron/core/datasets/helpers_cpp*.so; do
    cp -n -- "$helper" "$site/megatron/core/datasets/"
  done
  rm -rf -- "$work"
  work=''
}

if ((gpu_target)) || [[ -n $wanted_python ]]; then
  if ((gpu_target)) && [[ -n $wanted_python ]]; then
    fail "--gpu-target and --python $wanted_python cannot be combined; use one of them"
  elif ((gpu_target)); then
    option=--gpu-target
    target=$cache/gpu-target
    target_version=3.12
    target_torch=torch==2.11.0 # the package index has its wheel for CUDA 13.0
  else
    option="--python $wanted_python"
    target=$cache/python-$wanted_python
    target_version=$wanted_python
    target_torch=$(grep '^torch==' requirements.txt)
  fi
  for part in "${!asked[@]}"; do
    if ((asked[$part])) && [[ $part != test ]]; then
      fail "$option cannot be combined with --$part; remove --$part or --all"
    fi
  done
  if ((print_only)); then
    printf '%s\n' "$target/bin/python"
    exit 0
  fi
  mkdir -p -- "$target"
  # Checkouts share the environment, so hold the lock while the usual set-up adds packages.
  exec 8>"$target/.lock"
  flock 8
  make_target
  if ((!gpu_target)); then install_newest_core; fi
  VIRTUAL_ENV=$target exec bash "$root/prerequisite.sh" --test
fi

choose_python
if ((print_only)); then
  printf '%s\n' "${python:-$venv/bin/python}"
  exit 0
fi
if [[ -z $python ]] || ! is_set_up; then
  # If two calls run at the same time, the second waits, and then has nothing left to do.
  mkdir -p -- "$root/build"
  exec 9>"$root/build/prerequisite.lock"
  flock 9
  choose_python
  extension=''
  if [[ -z $python ]] || ! is_set_up; then set_up 9>&-; fi
fi
printf '%s\n' "$python"
