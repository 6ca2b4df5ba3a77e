"""Prepares the keys and settings of an ssh server, and an ``ssh`` command that connects to it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SSHD = "/usr/sbin/sshd"
_SERVER = """
HostKey {0}/host_key
AuthorizedKeysFile {0}/key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile {0}/sshd.pid
"""


def why_not() -> str | None:
    """Returns the reason why sshd cannot run on this machine, or ``None`` if it can run."""
    is_here = Path(SSHD).exists() and shutil.which("ssh")
    return None if is_here else "ssh or sshd is missing: run bash prerequisite.sh --slurm"


def prepare(folder: Path, server: str, client: str) -> tuple[Path, list[str]]:
    """Writes keys, settings, and a script that replaces ``ssh``.

    Args:
        folder: Folder for these files, and for ``sshd.pid``.
        server: Additional settings of sshd, in which ``{0}`` stands for the folder.
        client: Settings of ssh for all hosts, without the key.

    Returns:
        Folder of the script, and the command that starts sshd in the background.
    """
    for name in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    (folder / "sshd_config").write_text((_SERVER + server).format(folder))
    (folder / "ssh_config").write_text(f"Host *\nIdentityFile {folder}/key\n{client}")
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    program.chmod(0o755)
    return program.parent, [SSHD, "-f", str(folder / "sshd_config")]
