"""What is checked on this machine before a job starts: files, image, log folder, port."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from megatron.adaptive.cluster.conf import LaunchConf
from megatron.adaptive.errors import ConfigError, SetupError

__all__ = ["check_files", "check_port", "make_folder"]


def check_files(conf: LaunchConf) -> None:
    """Check that data and image are there.

    Raises:
        ConfigError: one is not.
    """
    if conf["DATA"] != "mock":
        for ending in (".bin", ".idx"):
            path = Path(f"{conf.path('DATA')}{ending}")
            if not path.is_file():
                raise ConfigError(
                    f"DATA={conf['DATA']}: there is no file {path}; make it with python -m "
                    "megatron.adaptive preprocess-data, or set DATA=mock"
                )
    image = conf["IMAGE"] or ""
    is_file = {
        "apptainer": "://" not in image,
        "pyxis": image.startswith(("/", "./")),
    }.get(conf["CONTAINER"], False)
    if is_file and not conf.path("IMAGE").exists():
        raise ConfigError(
            f"IMAGE={image}: there is no {conf.path('IMAGE')}; CONTAINER={conf['CONTAINER']} "
            "needs it"
        )


def make_folder(folder: Path, name: str) -> None:
    """Make a folder and check that it can be written.

    Args:
        folder: absolute.
        name: the variable that names it.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name}={folder}: {error.strerror}; name another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}={folder}: this user may not write there; name another folder")


def check_port(port: int) -> None:
    """Check that a port of this machine is free.

    Raises:
        SetupError: another program listens on it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise SetupError(
                f"MASTER_PORT={port}: {error.strerror} on {socket.gethostname()}; another program "
                "listens there: set another MASTER_PORT"
            ) from error
