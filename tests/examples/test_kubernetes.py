"""Tests that all fields of the Kubernetes manifest are valid, and that its parts are consistent."""

from __future__ import annotations

import copy
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.cluster.conf import load_conf
from megatron.adaptive.cluster.node_processes import check_trainer

yaml = pytest.importorskip("yaml", reason="pip install pyyaml")

ROOT = Path(__file__).resolve().parents[2]
FIELDS = yaml.safe_load((Path(__file__).parent / "jobset.fields.yaml").read_text())
KINDS: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "object": (dict,),
    "text or integer": (str, int),
}


def mistakes(value: Any, fields: Any, path: str = "$") -> Iterator[str]:
    """Yields a message for each difference between ``value`` and its description ``fields``."""
    if isinstance(fields, str):
        if not _is(value, fields):
            yield f"{path}: {value!r} is not {fields}"
    elif not isinstance(value, type(fields)):
        yield f"{path}: {value!r} is not a {type(fields).__name__}"
    elif isinstance(fields, list):
        if len(fields) > 1 and not _within(len(value), fields[1]):
            yield f"{path}: {len(value)} entries, but it must have {fields[1]}"
        for number, entry in enumerate(value):
            yield from mistakes(entry, fields[0], f"{path}[{number}]")
    else:
        types = {name.removesuffix("!"): of for name, of in fields.items()}
        required = [name[:-1] for name in fields if name.endswith("!")]
        yield from (f"{path}: {name} is missing" for name in required if name not in value)
        for name, entry in value.items():
            if name in types or "*" in types:
                yield from mistakes(entry, types.get(name, types.get("*")), f"{path}.{name}")
            else:
                yield f"{path}: there is no field {name}"


def _is(value: Any, field: str) -> bool:
    if field.startswith("= ") or " | " in field:
        return value in field.removeprefix("= ").split(" | ")
    field, _, pattern = field.partition(" ~ ")
    kind, bounds = field.rsplit(" ", 1) if ".." in field else (field, "..")
    if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    return re.search(pattern, str(value)) is not None and (bounds == ".." or _within(value, bounds))


def _within(number: int, bounds: str) -> bool:
    least, _, most = bounds.partition("..")
    return int(least) <= number and (not most or number <= int(most))


@pytest.fixture
def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "examples/kubernetes/jobset.yaml").read_text()))


def job_of(jobset: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    return spec


def pod_of(jobset: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = job_of(jobset)["template"]["spec"]
    return spec


def test_it_has_only_fields_and_values_that_there_are(manifests: list[dict[str, Any]]) -> None:
    settings, jobset = manifests
    assert (settings["apiVersion"], settings["kind"]) == ("v1", "ConfigMap")
    assert list(mistakes(jobset, FIELDS)) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda jobset: jobset.update(kind="Jobset"), "$.kind"),
        (lambda jobset: jobset["spec"].update(replicatedJob=[]), "no field replicatedJob"),
        (lambda jobset: jobset["spec"].pop("replicatedJobs"), "replicatedJobs is missing"),
        (lambda jobset: job_of(jobset).update(completions="2"), "'2' is not integer"),
        (lambda jobset: pod_of(jobset)["containers"][0].update(command="bash"), "not a list"),
        (
            lambda jobset: pod_of(jobset)["volumes"][1]["emptyDir"].update(sizeLimit="16 G"),
            "sizeLimit",
        ),
    ],
)
def test_mistakes_are_found(
    change: Callable[[dict[str, Any]], Any], expected: str, manifests: list[dict[str, Any]]
) -> None:
    jobset = copy.deepcopy(manifests[1])
    change(jobset)
    (mistake,) = mistakes(jobset, FIELDS)
    assert expected in mistake


def test_its_parts_fit_each_other(manifests: list[dict[str, Any]], tmp_path: Path) -> None:
    settings, jobset = manifests
    job, pod = job_of(jobset), pod_of(jobset)
    (container,) = pod["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    path = tmp_path / "conf.sh"
    path.write_text(settings["data"]["conf.sh"])
    conf = load_conf(path, [f"NPROC_PER_NODE={gpus}"])
    assert conf.nodes == job["completions"] == job["parallelism"]
    assert job["completionMode"] == "Indexed"
    check_trainer(conf, conf.world_size or 0, tmp_path)
    assert all(conf[name].startswith("/shared/") for name in ("LOG_DIR", "CHECKPOINT_DIR"))
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert pod["volumes"][0]["configMap"]["name"] == settings["metadata"]["name"]
    script = container["command"][-1]
    job_name, name = jobset["spec"]["replicatedJobs"][0]["name"], jobset["metadata"]["name"]
    assert f"--master-addr {name}-{job_name}-0-0.{name} " in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    options = re.findall(r" (--[a-z-]+)", script)
    source = (ROOT / "megatron/adaptive/cli/node.py").read_text()
    assert options
    assert all(f'"{option}"' in source for option in options)
