"""Tests that the TorchX component follows the rules of TorchX and starts the right command."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPONENT = ROOT / "examples" / "torchx" / "component.py"
WITH_TORCHX = """
import json, runpy, sys
from torchx.specs import macros
from torchx.specs.file_linter import validate
path = sys.argv[1]
found = [message.description for message in validate(path, "pods")]
app = runpy.run_path(path)["pods"](conf="/c.sh", nnodes=3)
values = macros.Values(img_root="", app_id="a", replica_id="1", rank0_env="FIRST")
role = values.apply(app.roles[0])
print(json.dumps([found, role.num_replicas, role.args, role.env]))
"""


@pytest.fixture(scope="module")
def tree() -> ast.Module:
    return ast.parse(COMPONENT.read_text())


def test_it_keeps_the_rules_for_components(tree: ast.Module) -> None:
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    assert ast.unparse(function.returns or ast.Constant(None)) == "specs.AppDef"
    names = [argument.arg for argument in function.args.args]
    kinds = {
        ast.unparse(argument.annotation) for argument in function.args.args if argument.annotation
    }
    assert len(names) == len([argument for argument in function.args.args if argument.annotation])
    assert kinds <= {"int", "str", "float", "bool"}
    text = ast.get_docstring(function) or ""
    assert re.findall(r"^    (\w+): \S", text.partition("Args:")[2], re.MULTILINE) == names


def start_of(tree: ast.Module, replica: str) -> str:
    """Returns the shell command that TorchX would run in the container ``replica``."""
    (text,) = (
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    )
    filled = text.replace("%replica%", replica).replace("%host%", "FIRST_HOST")
    return str(filled.replace("$$", "$"))


@pytest.mark.parametrize(
    ("replica", "expected"),
    [
        ("0", "error: /no/conf.sh: no such file"),
        ("1", "error: --node-rank 1: the master was not reached within 1 s"),
    ],
)
def test_the_first_replica_is_the_master(replica: str, expected: str, tree: ast.Module) -> None:
    done = subprocess.run(
        ["bash", "-euc", start_of(tree, replica).replace("--node-rank", "--timeout 1 --node-rank")],
        cwd=ROOT,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHON": sys.executable,
            "CONF": "/no/conf.sh",
            "NNODES": "2",
            "LOGS": "/no/logs",
            "MASTER_PORT": "29642",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    start = expected.replace("--node-rank 1: ", "")
    assert done.stderr.splitlines()[-1].startswith(start), done.stderr


def test_torchx_itself_takes_it() -> None:
    pytest.importorskip("torchx", reason="pip install torchx, in an environment of its own")
    done = subprocess.run(
        [sys.executable, "-c", WITH_TORCHX, str(COMPONENT)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    problems, replicas, command, variables = json.loads(done.stdout)
    assert (problems, replicas, variables["NNODES"]) == ([], 3, "3")
    assert '"${FIRST:=localhost}" --node-rank 1' in command[-1]
