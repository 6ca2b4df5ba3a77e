"""Tests the script that finds Megatron-LM flags without an entry in any list."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.unsupported_flags import is_idle, reason_for
from megatron.adaptive.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = """
def add_arguments(parser):
    parser.add_argument("--num-layers", type=int, help="taken")
    parser.add_argument("--bert-load", help="ignored")
    parser.add_argument("--quantum-layers", type=int, help="Number of quantum layers.")
    parser.add_argument("--cold-loss", action=argparse.BooleanOptionalAction)
    excluded = ["left_out"]
    ArgumentGroupFactory(FirstConfig, exclude=excluded).build_group(parser, "first")
    ArgumentGroupFactory(HeatConfig).build_group(parser, "second")
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


def run(tree: Path) -> subprocess.CompletedProcess[str]:
    """Runs the script with ``tree``, a source tree of Megatron-LM. Returns the finished process."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "unlisted_flags.py"), str(tree)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )


def test_flags_of_calls_and_of_dataclasses_are_found(tmp_path: Path) -> None:
    training = tmp_path / "megatron" / "training"
    (training / "config").mkdir(parents=True)
    (training / "arguments.py").write_text(ARGUMENTS)
    (training / "config" / "first_config.py").write_text(CONFIG)
    (tmp_path / "megatron" / "core").mkdir()
    (tmp_path / "megatron" / "core" / "heat.py").write_text(
        "class HeatConfig:\n    heat_loss: float = 0\n"
    )
    done = run(tmp_path)
    assert done.returncode == 1, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == [
        "--cold-loss",
        "--disable-entangled",
        "--heat-loss",
        "--no-cold-loss",
        "--no-entangled",
        "--other-name",
        "--quantum-layers",
        "--tunnel-width",
    ]
    assert "Number of quantum layers." in done.stdout
    assert done.stderr == "8 of 10 flags are not listed\n"


def test_a_class_that_makes_flags_and_is_nowhere_is_an_error(tmp_path: Path) -> None:
    """Checks that a class that defines flags is reported if no source file contains it."""
    training = tmp_path / "megatron" / "training"
    training.mkdir(parents=True)
    (training / "arguments.py").write_text(ARGUMENTS)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "no file below megatron defines FirstConfig, HeatConfig" in done.stderr


@pytest.mark.parametrize(
    ("flag", "listed"),
    [("--disable-manual-gc-eval", "--no-manual-gc-eval"), ("--disable-msc", "--disable-msc")],
)
def test_the_other_spelling_of_a_flag_is_listed_as_the_first(flag: str, listed: str) -> None:
    assert is_idle(flag)
    assert is_idle(listed)
    assert reason_for("--fault-injector-seed") is not None


def test_the_other_spelling_of_a_flag_of_the_trainer_is_named() -> None:
    message = "^--disable-align-grad-reduce is another spelling of --no-align-grad-reduce"
    with pytest.raises(ConfigError, match=message):
        parse(["--disable-align-grad-reduce"], world_size=1)


@pytest.mark.parametrize(
    "flag",
    [
        "--freeze-base-for-mtp",
        "--modelopt-enabled",
        "--enable-gpt-oss",
        "--finetune-hf-dataset",
        "--qad-train-target",
    ],
)
def test_a_flag_without_which_another_model_is_trained_is_refused(flag: str) -> None:
    """Checks that a flag is rejected if ignoring it would mean training a different model."""
    with pytest.raises(ConfigError, match=f"^{flag} is a flag of Megatron-LM that this trainer"):
        parse([flag, "1"], world_size=1)
