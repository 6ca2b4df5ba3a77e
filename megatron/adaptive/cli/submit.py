"""Writes the batch script of a Slurm job, and submits it with ``sbatch``."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.adaptive.cli.common import show
from megatron.adaptive.cluster.conf import LaunchConf, LaunchGroup, load_conf
from megatron.adaptive.cluster.node_processes import (
    EXIT_STOPPED_EARLY,
    check_files,
    check_trainer,
    make_folder,
    mounts_of,
    python_of,
)
from megatron.adaptive.config.command_parser import PROGRAM, CommandParser
from megatron.adaptive.config.environment import WORK_FOLDER, masked
from megatron.adaptive.errors import ConfigError, SetupError


def main(argv: Sequence[str]) -> int:
    """Checks the configuration, writes the batch script, and submits the script to Slurm."""
    parser = CommandParser(
        prog=f"{PROGRAM} job submit",
        description="Write the batch script of a Slurm job, and submit it.",
    )
    add = parser.add_argument
    conf_file = WORK_FOLDER / "conf.sh"
    text = "configuration file (conf.sh)"
    add("conf", nargs="?", type=Path, default=conf_file, help=text)
    add("--dry-run", action="store_true", help="only print the script")
    add("--plan", type=Path, help="plan file to use instead of the one in conf.sh")
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="changes")
    options = parser.parse_args(argv)
    conf = load_conf(options.conf, options.changes, options.plan)
    check_files(conf)
    logs = conf.path("LOG_DIR")
    settings = logs / "submitted" / f"{conf['JOB_NAME']}-{time.time_ns()}.json"
    script = batch_script(conf, settings)
    check_trainer(conf, conf.world_size or 1, logs / "job")
    if options.dry_run:
        print(script, end="")
        return 0
    # Call Slurm first, so that no file is written if Slurm is missing.
    slurm(["sbatch", "--version"])
    make_folder(settings.parent)
    job = submit(conf, script, settings)
    show(f"submitted job {job}; its logs will be in {logs / str(job)}")
    watch = shlex.join(
        ["bash", str(WORK_FOLDER / "get_result.sh"), str(job), "--log-dir", str(logs)]
    )
    show(f"to watch it, run {watch}")
    return 0


_LIMIT_S = 30.0
_WARNING_S = 90
_FIRST_PORT = 20000
_PORTS = 10000
_SUBMITTED = re.compile(r"(\d+)")

_BODY = """
set -euo pipefail
run=$logs/$SLURM_JOB_ID
if [[ -e $run && ${SLURM_RESTART_COUNT:-0} == 0 ]]; then
  echo "error: LOG_DIR=$logs: $run has another job's logs; change LOG_DIR, or move the folder" >&2
  exit 2
fi
mkdir -p -- "$run"
hosts=$(%HOSTS%)
export MASTER_ADDR=${head:-${hosts%%$'\\n'*}}
export MASTER_PORT=${port:-$((%FIRST% + SLURM_JOB_ID % %PORTS%))}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): logs in $run"

# Prints the nodes of the job whose slurmd does not answer.
lost() {
  local host port
  port=$(scontrol show config | awk '$1 == "SlurmdPort" { sub(/-.*/, "", $3); print $3 }')
  for host in ${port:+$hosts}; do
    timeout 3 bash -c "</dev/tcp/$host/$port" 2>/dev/null || printf ' %s' "$host"
  done
}

status=0
%SRUN% "$python" -m megatron.adaptive job node slurm "$settings" "$run" || status=$?
again=''
if ((status == %EARLY%)); then
  again='the time limit was near'
elif ((status)) && scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then
  again='a job with higher priority preempted this job'
elif ((status)); then
  gone=$(lost)
  if [[ -n $gone ]]; then
    echo "error: job $SLURM_JOB_ID lost node$gone: it crashed or has no network" >&2
    again='a node was lost'
  fi
fi
"""
_REQUEUE = """if [[ -n $again ]]; then
  echo "$again: the run continues in the same job from its last checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
"""
_END = """if [[ -n $again ]]; then
  echo "$again: the job ends because of REQUEUE=false"
fi
"""


def slurm(command: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """Runs a Slurm program and returns its standard output.

    Args:
        command: Command line of the program.
        variables: Environment variables to set in addition to those of this process, or ``None``
            for no additional variables.

    Raises:
        SetupError: The program is missing or fails, or Slurm does not respond.
    """
    if shutil.which(command[0]) is None:
        raise SetupError(
            f"{command[0]} is not installed on this machine: run this command on a login node of "
            "the cluster, or use run_master.sh and run_worker.sh on nodes without Slurm"
        )
    try:
        done = subprocess.run(
            list(command),
            env={**os.environ, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"{command[0]} did not answer within {_LIMIT_S:g} s; check that slurmctld is running"
        ) from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        text = "; ".join(lines).replace(f"{command[0]}: error: ", "")
        raise SetupError(f"{command[0]}: {text or f'status {done.returncode}'}")
    return done.stdout


def batch_script(conf: LaunchConf, settings: Path) -> str:
    """Returns the text of the batch script for ``sbatch``.

    Args:
        conf: Configuration of the launch.
        settings: Path of the settings file (see :func:`settings_text`), in storage that all nodes
            share.

    Raises:
        ConfigError: A setting that Slurm requires is missing, or an option contains a secret.
    """
    if conf.processes is None:
        name = "NNODES" if conf.nodes is None else "NPROC_PER_NODE"
        raise ConfigError(f"jobs on Slurm require {name}; set it")
    logs = conf.path("LOG_DIR")
    head = ["#!/bin/bash", *_directives(_job_options(conf, logs))]
    for index, group in enumerate(conf.groups):
        head += ["#SBATCH hetjob"] * bool(index) + _directives(_group_options(conf, group))
    names = {
        "root": str(WORK_FOLDER),
        "logs": str(logs),
        "settings": str(settings),
        "python": python_of(conf),
        "head": conf["MASTER_ADDR"] or "",
        "port": str(conf["MASTER_PORT"] or ""),
    }
    values = [f"{name}={shlex.quote(value)}" for name, value in names.items()]
    body = _BODY.replace("%SRUN%", shlex.join(_srun(conf)))
    body = body.replace("%FIRST%", str(_FIRST_PORT)).replace("%PORTS%", str(_PORTS))
    body = body.replace("%EARLY%", str(EXIT_STOPPED_EARLY)).replace("%HOSTS%", _hosts(conf))
    body += _REQUEUE if conf["REQUEUE"] else _END
    return "\n".join([*head, "", *values]) + body + 'exit "$status"\n'


def _hosts(conf: LaunchConf) -> str:
    """Returns shell commands that print the host names of the job, ordered by node rank."""
    names = ["SLURM_JOB_NODELIST"]
    if len(conf.groups) > 1:
        names = [f"SLURM_JOB_NODELIST_HET_GROUP_{index}" for index in range(len(conf.groups))]
    return "; ".join(f'scontrol show hostnames "${name}"' for name in names)


def _job_options(conf: LaunchConf, logs: Path) -> list[str]:
    options = [
        f"--job-name={conf['JOB_NAME']}",
        f"--output={logs}/%j.batch",
        "--open-mode=append",
        f"--signal=USR1@{_WARNING_S}",
        "--requeue" if conf["REQUEUE"] else "--no-requeue",
    ]
    user_options = shlex.split(conf["SLURM_FLAGS"] or "")
    if (shown := masked(user_options)) != user_options:
        raise ConfigError(
            f"SLURM_FLAGS={shlex.join(shown)} contains a secret, which every user could read in "
            'the batch script; set the variable in conf.sh, or export it before "job submit"'
        )
    return options + user_options


def _group_options(conf: LaunchConf, group: LaunchGroup) -> list[str]:
    options = [f"--nodes={group.nodes}", "--ntasks-per-node=1"]
    for name, flag in (
        ("CPUS_PER_TASK", "cpus-per-task"),
        ("SLURM_TIME", "time"),
        ("SLURM_ACCOUNT", "account"),
    ):
        if conf[name] is not None:
            options.append(f"--{flag}={conf[name]}")
    if group.partition:
        options.append(f"--partition={group.partition}")
    if conf["DEVICE"] == "gpu" and group.gres != "none":
        kind, _, model = group.gres.partition(":")
        amount = f"{model}:{group.processes}" if model else str(group.processes)
        # Use --gpus-per-node, because with --gpus-per-task and a GPU type, Slurm would leave
        # CUDA_VISIBLE_DEVICES empty.
        options.append(
            f"--gpus-per-node={amount}"
            if kind == "gpu"
            else f"--gres={group.gres}:{group.processes}"
        )
    return options


def _directives(options: Sequence[str]) -> list[str]:
    lines = []
    for option in options:
        name, equals, value = option.partition("=")
        text = f'"{value}"' if any(letter.isspace() for letter in value) else value
        lines.append(f"#SBATCH {name}{equals}{text}")
    return lines


def _srun(conf: LaunchConf) -> list[str]:
    command = ["srun", "--kill-on-bad-exit=1"]
    if len(conf.groups) > 1:
        command.append(f"--het-group=0-{len(conf.groups) - 1}")
    if conf["CONTAINER"] == "pyxis":
        mounts = ",".join(mounts_of(conf, conf.path("LOG_DIR")))
        command += [f"--container-image={conf['IMAGE']}", f"--container-mounts={mounts}"]
        if not conf["RELOAD_CONTAINER"]:
            command.append(f"--container-name={conf['JOB_NAME']}")
    return command


def settings_text(conf: LaunchConf) -> str:
    """Returns the settings for a job's nodes as JSON. Secrets are listed without their values."""
    settings = {"conf": conf.texts(), "folder": str(conf.folder), "secrets": [*conf.secrets]}
    return json.dumps(settings, indent=2) + "\n"


def submit(conf: LaunchConf, script: str, settings: Path) -> int:
    """Writes the settings file and the batch script, and submits the script with ``sbatch``.

    Args:
        conf: Configuration of the launch.
        script: Text of the batch script.
        settings: Path of the settings file. The script is written next to it.

    Returns:
        ID of the new job in Slurm.

    Raises:
        ConfigError: The log folder cannot be written, or Slurm rejects the job.
        SetupError: Slurm is missing or does not respond.
    """
    with open(settings, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        # The file must be private, because TRAINER_FLAGS may contain a secret.
        file.write(settings_text(conf))
    path = settings.with_suffix(".sbatch")
    path.write_text(script)
    os.chmod(path, 0o755)
    try:
        output = slurm(["sbatch", "--parsable", str(path)], conf.secrets)
    except SetupError as error:
        raise ConfigError(
            f"Slurm rejected the job ({error}); check NNODES, NPROC_PER_NODE, SLURM_PARTITION, "
            f"SLURM_GRES, SLURM_ACCOUNT, SLURM_TIME and SLURM_FLAGS, the output of sinfo, and the "
            f"batch script {path}"
        ) from error
    match = _SUBMITTED.match(output.strip())
    if match is None:
        raise SetupError(
            f"sbatch printed {output.strip()!r}, which contains no job ID; run squeue to see "
            "whether the job was submitted"
        )
    return int(match[1])
