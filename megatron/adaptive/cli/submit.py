"""``submit``: gives a run to Slurm as ``conf.sh`` says."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.adaptive.cluster.conf import load_conf
from megatron.adaptive.cluster.node import ROOT, check_files, check_trainer, make_folder
from megatron.adaptive.cluster.slurm import batch_script, check_cluster, submit
from megatron.adaptive.config.command_parser import CommandParser


def main(argv: Sequence[str]) -> int:
    """Check the configuration, write the script and submit it.

    Returns:
        Exit status 0.

    Raises:
        ConfigError: a variable breaks a rule, or Slurm refuses the job.
        SetupError: Slurm is not here or does not answer.
    """
    parser = CommandParser(
        prog="python -m megatron.adaptive submit",
        allow_abbrev=False,
        description="Write the script of a job of Slurm and submit it.",
    )
    add = parser.add_argument
    add("conf", nargs="?", type=Path, default=ROOT / "conf.sh", help="configuration (conf.sh)")
    add("--dry-run", action="store_true", help="only print the script")
    add("--plan", type=Path, help="plan file in place of what conf.sh says")
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
    check_cluster(conf)
    make_folder(settings.parent, "LOG_DIR")
    job = submit(conf, script, settings)
    print(f"job {job}: logs in {logs / str(job)}")
    watch = shlex.join(["bash", str(ROOT / "get_result.sh"), str(job), "--log-dir", str(logs)])
    print(f"watch it: {watch}", flush=True)
    return 0
