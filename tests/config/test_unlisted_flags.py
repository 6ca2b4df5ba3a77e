"""Tests the script that finds flags of a Megatron-LM tree that are missing in all lists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = """
def add_arguments(parser):
    parser.add_argument("--num-layers", type=int, help="taken")
    parser.add_argument("--bert-load", help="ignored")
    parser.add_argument("--quantum-layers", type=int, help="Number of quantum layers.")
    excluded = ["left_out"]
    ArgumentGroupFactory(FirstConfig, exclude=excluded).build_group(parser, "first")
"""
CONFIG = '''
class BaseConfig:
    tunnel_width: int = 3
    """Width of a tunnel."""

class FirstConfig(BaseConfig):
    left_out: int = 0
    entangled: bool = True
    hook: Callable = None
    computed: int = field(init=False)
    named: str = field(default="x", metadata={"argparse_meta": {"arg_names": ["--other-name"]}})
'''


def test_flags_of_calls_and_of_dataclasses_are_found(tmp_path: Path) -> None:
    training = tmp_path / "megatron" / "training"
    (training / "config").mkdir(parents=True)
    (training / "arguments.py").write_text(ARGUMENTS)
    (training / "config" / "first_config.py").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "unlisted_flags.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert done.returncode == 1, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["--no-entangled", "--other-name", "--quantum-layers", "--tunnel-width"]
    assert "Number of quantum layers." in done.stdout
    assert done.stderr == "4 of 6 flags are in no list\n"
