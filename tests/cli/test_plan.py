"""Tests the output, the files and the errors of ``plan``, and runs that use a plan."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from megatron.adaptive.cli.plan import main
from megatron.adaptive.cluster.conf import load_conf
from megatron.adaptive.cluster.node_processes import check_trainer, trainer_flags
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.model import MODELS
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.model_file import preset

CLUSTER = """\
format: 1
nodes:
  - {type: big, gpu: A100-40, count: 2, gpus_per_node: 2,
     link: {bandwidth: 230 GB/s, latency: 5 us}, price_per_hour: 10}
  - {type: small, gpu: T4, count: 2, gpus_per_node: 2,
     link: {bandwidth: 10 GB/s, latency: 8 us}, price_per_hour: 2}
network: {bandwidth: 25 Gbit/s, latency: 20 us}
"""
MEDIUM = "--model gpt2-medium --global-batch-size 16 --tp 1 --recompute none --top 1 "
MEDIUM += "--micro-batch-sizes 1,8"
PLAN = "--model gpt2 --global-batch-size 8 --micro-batch-sizes 1,2 --tp 1,2 --top 2"
PLAN += " --recompute none"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


def run(cluster: Path, flags: str) -> int:
    return main(["--cluster", str(cluster), *flags.split()])


def test_a_discovered_cluster_is_one_to_plan_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for host in ("n1", "n2"):
        node = {"gpu": "a100-40", "gpus_per_node": 2, "link": {"bandwidth": "300 GB/s"}}
        files.append(tmp_path / f"{host}.json")
        files[-1].write_text(json.dumps({"host": host, "node": node, "checks": []}))
    assert main(["--discover", *map(str, files)]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("assumed: the network of a100-40 is 100 Gbit/s; correct this")
    cluster_file = tmp_path / "found.json"
    cluster_file.write_text(printed.out)
    assert run(cluster_file, f"{PLAN} --tp 1 --top 1") == 0
    assert "on 4 GPUs" in capsys.readouterr().out


def test_a_margin_of_memory_is_left(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = []
    for margin in ("0.5", "0"):
        assert run(cluster, f"{PLAN} --tp 1 --top 1 --json --memory-margin {margin}") == 0
        plan = json.loads(capsys.readouterr().out)[0]["prediction"]
        assert max(plan["memory_bytes"]) <= min(plan["memory_limit_bytes"])
        limits.append(max(plan["memory_limit_bytes"]))
    assert limits[0] == limits[1] / 2


def test_table_and_explanation(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cluster, f"{PLAN} --explain --tokens 1e9") == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "gpt2, 124 M parameters, fp16, on 8 GPUs; 8 samples of 1,024 tokens per step\n"
    )
    assert re.search(
        r"tp +dp +pp +batch .* tokens/s  per GPU +MFU  bubble .*price/step .*price/run", said
    )
    assert re.search(r"\n1 .*\n +layers [-0-9]+ on .*\n2 .*\n +layers", said)
    assert "estimated from data sheets, not measured: a100-40, t4" in said
    parts = re.findall(r"^  (\w+) +[\d.]+ ?\w* +([\d.]+)%", said, re.MULTILINE)
    assert {"compute", "bubble", "transfer", "optimizer"} <= {name for name, _ in parts}
    assert sum(float(share) for _, share in parts) == pytest.approx(100, abs=1)
    assert "held back by" in said


def test_trainer_and_launcher_run_what_was_planned(cluster: Path, tmp_path: Path) -> None:
    plan, conf = tmp_path / "plan.json", tmp_path / "plan.sh"
    flags = "--model gpt2 --global-batch-size 8 --pp 2 --dp 2 --tp 1"
    assert run(cluster, f"{flags} --output {plan} --conf {conf}") == 0
    document = json.loads(plan.read_text())
    degrees = document["degrees"]
    size = degrees["tensor"] * degrees["pipeline"] * degrees["data"]
    assert size == 4
    assert sum(document["partition"]) == 12
    run_flags = "--train-iters 1 --lr 1e-4 --mock-data --vocab-size 100".split()
    model = [*MODELS["gpt2"].split(), *run_flags]
    by_plan = parse([*model, "--plan", str(plan)], world_size=size)
    assert by_plan.layers_per_stage == tuple(document["partition"])
    assert by_plan.precision.fp16

    path = tmp_path / "conf.sh"
    path.write_text("MODEL=gpt2\nPLAN=plan.json\n")
    by_key = load_conf(path)
    check_trainer(by_key, size, tmp_path)
    assert sum(by_key.processes or ()) == size
    path.write_text(conf.read_text())
    assert trainer_flags(load_conf(path), tmp_path) == trainer_flags(by_key, tmp_path)
    last = parse(trainer_flags(by_key, tmp_path), world_size=size, last_wins=True)
    assert last.parallel == by_plan.parallel
    assert (last.batch, last.schedule, last.recompute) == (
        *(by_plan.batch, by_plan.schedule, by_plan.recompute),
    )
    assert subprocess.run(["bash", "-n", str(conf)], check=False).returncode == 0


@pytest.mark.parametrize("schedules", ["1f1b", "interleaved"])
def test_megatron_flags_are_what_the_trainer_takes(
    schedules: str, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--model gpt2 --global-batch-size 8 --pp 2 --dp 1 --tp 2 --schedules {schedules}"
    assert run(cluster, f"{flags} --json --top 1") == 0
    plan = json.loads(capsys.readouterr().out)[0]
    assert run(cluster, f"{flags} --export megatron") == 0
    arguments = shlex.split(capsys.readouterr().out)
    taken = parse([*arguments, *"--train-iters 1 --lr 1e-4 --mock-data".split()], world_size=4)
    assert list(taken.layers_per_stage) == plan["partition"]
    assert taken.parallel.num_chunks == plan["degrees"]["chunks"]
    assert taken.batch.micro_batch_size == plan["micro_batch_size"]


def test_other_programs_get_their_own_form(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--model gpt2 --global-batch-size 8 --pp 2 --dp 1 --tp 1 --schedules 1f1b"
    assert run(cluster, f"{flags} --precision fp32 --export torchtitan") == 0
    titan = tomllib.loads(capsys.readouterr().out)
    parts = titan["parallelism"]["module_fqns_per_model_part"]
    assert titan["parallelism"]["pipeline_parallel_schedule"] == "1F1B"
    assert [name for part in parts for name in part if name.startswith("layers")] == [
        f"layers.{number}" for number in range(12)
    ]
    assert parts[0][0] == "tok_embeddings"
    assert parts[-1][-1] == "output"
    assert run(cluster, f"{flags} --export sbatch") == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[:2] == ["sbatch", "--nodes=1"]
    ranks = shlex.split(shlex.split(command[-1].partition("=")[2])[-1])
    assert ranks[ranks.index("--nproc-per-node") + 1] == "2"
    assert ranks[ranks.index("--plan") + 1] == "plan.json"
    for form, words_of in (("megatron", "zb-h1"), ("torchtitan", "zb-h1")):
        with pytest.raises(
            ConfigError, match=f"--export {form}: .* not support schedule {words_of}"
        ):
            run(cluster, f"{flags.replace('1f1b', 'zb-h1')} --export {form}")


def test_two_plans_are_compared(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, tp in zip(files, (1, 2), strict=True):
        run(cluster, f"--model gpt2 --global-batch-size 8 --top 1 --tp {tp} --output {path}")
    capsys.readouterr()
    assert main(["--compare", *map(str, files)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"tensor +1 +2\n", said)
    assert re.search(r"step, s .* \([+-][\d.]+%\)", said)
    assert re.search(r"b.json is (slower|faster) than .*a.json: \w+ [+-]", said)
    for text, message in (('{"format": 1}', "contains no prediction"), ("[1]", "keys with values")):
        files[1].write_text(text)
        with pytest.raises(ConfigError, match=message):
            main(["--compare", *map(str, files)])


def test_speed_of_a_gpu_and_neighbours_are_shown(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, plan = tmp_path / "plan.html", tmp_path / "plan.json"
    flags = "--model gpt2-medium --global-batch-size 16 --tp 1 --dp 1 --pp 2 --top 1"
    flags += " --micro-batch-sizes 4 --recompute none --schedules 1f1b,zb-h1"
    assert run(cluster, f"{flags} --explain --page {page} --output {plan}") == 0
    said = capsys.readouterr().out
    seen = json.loads(plan.read_text())["prediction"]
    assert seen["tokens_per_s_per_gpu"] == pytest.approx(seen["tokens_per_s"] / 2)
    # The model needs 6 operations per parameter and token, and further operations for attention
    # scores.
    model = preset("gpt2-medium")
    least = 6 * model.parameters * seen["tokens_per_s"] / (2 * 312e12)
    assert least < seen["mfu"] < 1.3 * least
    assert f"{seen['mfu']:.1%}" in said
    for neighbour in ("tp 2", "dp 2", "pp 4", "microbatch 2", "recompute full"):
        assert re.search(rf"\n  {neighbour}: ([+-][\d.]+%|[\d.]+ GB short of memory|no plan)", said)
    text = page.read_text()
    assert "microbatch %{customdata}" in text
    assert "activation" in text


@pytest.mark.long
def test_plans_that_the_trainer_refuses_are_left_out(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experts = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128"
    experts += " --max-position-embeddings 128 --vocab-size 500 --num-experts 4 --fp16"
    flags = ["--global-batch-size", "8", "--top", "2", "--cluster", str(cluster)]
    assert main(["--model", experts, *flags, "--tp", "1,2", "--json"]) == 0
    assert {row["degrees"]["tensor"] for row in json.loads(capsys.readouterr().out)} == {1}
    with pytest.raises(
        ConfigError, match="rejects all plans that were found: .*--disable-bias-linear"
    ):
        main(["--model", experts, *flags, "--tp", "2"])


def test_objectives_differ_as_they_should(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def best(flags: str) -> dict[str, Any]:
        run(cluster, f"{MEDIUM} --json {flags}")
        plan: dict[str, Any] = json.loads(capsys.readouterr().out)[0]["prediction"]
        return plan

    fastest, cheapest = best(""), best("--objective cost")
    assert fastest["step_s"] < cheapest["step_s"]
    assert fastest["price_per_step"] > cheapest["price_per_step"]
    between = fastest["step_s"] * 1.5
    assert best(f"--objective cost --time-limit {between}s")["step_s"] <= between
    tokens = 16 * 1024 * 1000
    budget = cheapest["price_per_step"] * 1000 * 1.001
    limited = best(f"--budget {budget} --tokens {tokens}")
    assert limited["price_per_step"] * 1000 <= budget


def test_the_front_is_written_and_drawn(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "front"
    assert run(cluster, f"{PLAN} --pareto {folder}") == 0
    predictions = [
        faster["prediction"] for faster in json.loads((folder / "front.json").read_text())
    ]
    assert predictions
    for faster, slower in itertools.pairwise(predictions):
        assert faster["step_s"] < slower["step_s"]
        assert faster["price_per_step"] > slower["price_per_step"]
    assert (folder / "front.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "front.html").read_text()
    assert "tokens per second" in page
    assert "src=" not in page.split("<script", 1)[0]
    assert json.loads((folder / "plan-1.json").read_text())["model"] == "gpt2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--model llama-30b --global-batch-size 8 --precision fp16 --dp 1",
            r"llama-30b does not fit on .* stage \d on (big|small) needs [\d.]+ GB but has only "
            r"[\d.]+ GB, so it is [\d.]+ GB short; the model would fit with .*nodes of big instead "
            "of 2",
        ),
        (
            "--model gpt2-xl --global-batch-size 16 --recompute none --pp 2 --tp 1 --dp 1"
            " --micro-batch-sizes 16",
            "would fit with all values of --recompute allowed, or",
        ),
        ("--model gpt2 --global-batch-size 7 --dp 2", "7 is not divisible by --dp 2"),
        (
            "--model gpt2 --global-batch-size 6 --dp 2 --micro-batch-sizes 2",
            "not divisible by --dp 2 and --micro-batch-sizes 2",
        ),
        (
            "--model gpt2 --global-batch-size 8 --tp 2 --pp 4 --dp 4",
            "--tp 2 and --dp 4 and --pp 4: at least 32 GPUs are needed, but the cluster has 8",
        ),
        (
            "--model gpt2 --global-batch-size 8 --partition 6-5",
            "layers 6-5 add up to 11, but model gpt2 has",
        ),
        ("--model gpt2 --global-batch-size 8 --partition 6-0-6", "stage 1 has no layer"),
        (
            "--model gpt2 --global-batch-size 8 --recompute some",
            "--recompute must be one of none, .*, got some",
        ),
        (
            "--model gpt2 --global-batch-size 8 --partition 6-6 --pp 3",
            "--partition has 2 stages, but --pp is 3; .* one stage per pipeline rank. Remove",
        ),
        (f"{PLAN} --time-limit 1us", "a step takes at least"),
        ("--model gpt2 --global-batch-size 8 --time-limit 1", "--time-limit must be a number"),
        (f"{PLAN} --max-price 1", "nodes cost at least 2 per hour"),
        ("--model gpt2 --global-batch-size 8 --budget 1", "--budget requires --tokens"),
        (
            "--model gpt2 --global-batch-size 8 --tp 4",
            "--tp 4 must divide the number of GPUs of a node",
        ),
        ("--model gpt2 --global-batch-size 8 --tp 5", "--tp 5 must divide the number of heads"),
        (
            "--model gpt2 --global-batch-size 8 --tp 0",
            "--tp must be a list of different positive integers, such as 1,2,4, got 0",
        ),
        ("--model gpt2 --global-batch-size 8 --precision bf16", "t4 does not support bf16"),
        (
            "--model gpt2 --global-batch-size 8 --schedules 2f2b",
            "--schedules must be a list of names from .*, got 2f2b",
        ),
        (
            "--model gpt2 --global-batch-size 8 --schedules forward-only",
            "--schedules must be a list of names from .*, got forward-only",
        ),
        ("--model gpt2 --global-batch-size 8 --profile nowhere.json", "No such file"),
        ("--model gpt2 --global-batch-size 8 --objectiv cost --foo", "plan: .*--foo"),
    ],
)
def test_a_bad_request_is_named(flags: str, message: str, cluster: Path) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        run(cluster, flags)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{PLAN} --rank 1", "--rank 1 requires --try"),
        (f"{PLAN} --world-size=2", "--world-size 2 requires --try"),
        ("--compare plan.json", "--cluster has no effect with --compare; remove one"),
        ("--discover", "--cluster has no effect with --discover; remove one"),
        ("--try plan.json --precision fp16", "--cluster has no effect with --try; remove one"),
        (f"{PLAN} --pareto front --output plan.json", "--output has no effect with --pareto"),
        (f"{PLAN} --json --explain", "--explain has no effect with --json; remove one"),
    ],
)
def test_options_that_a_mode_ignores_are_refused(flags: str, message: str, cluster: Path) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        run(cluster, flags)
    assert "\n" not in str(info.value)


def test_runs_to_check_may_follow_an_equals_sign(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pass the folder with the traced runs"):
        main([f"--check={tmp_path / 'no'}", "--rows"])


@pytest.mark.long
def test_two_limits_that_exclude_each_other_are_named(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(cluster, f"{PLAN} --json")
    fastest = json.loads(capsys.readouterr().out)[0]["prediction"]["step_s"]
    flags = f"{PLAN} --max-price 3 --time-limit {fastest * 1.2}s"
    with pytest.raises(ConfigError, match="--time-limit and --max-price conflict"):
        run(cluster, flags)


def test_a_measured_profile_counts_and_one_of_another_model_is_refused(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "kind": kind,
            "gpu": gpu,
            "tp": 1,
            "micro_batch": 1,
            "forward_s": 0.001,
            "backward_input_s": 0.002,
        }
        for kind in ("embedding", "transformer", "head")
        for gpu in ("a100", "t4")
    ]
    model = {"name": "gpt2", "arguments": list(preset("gpt2", "fp16").arguments)}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"format": 1, "model": model, "layers": rows}))
    assert run(cluster, f"{PLAN} --tp 1 --pp 1 --micro-batch-sizes 1 --profile {path}") == 0
    said = capsys.readouterr().out
    assert "not measured" not in said
    # Each of the two replicas has 4 microbatches, and each of the 14 layers takes 3 ms.
    match = re.search(r"1f1b +\w+ +\w+ +([\d.]+) (m?s)", said)
    assert match is not None
    seconds = float(match[1]) * (1e-3 if match[2] == "ms" else 1)
    assert seconds == pytest.approx(4 * 14 * 0.003, rel=0.35)
    with pytest.raises(ConfigError, match="describes model gpt2, whose embedding has"):
        run(cluster, f"--model gpt2-xl --global-batch-size 8 --profile {path}")


def test_a_gpu_that_only_the_profile_knows_stands_beside_one_of_the_table(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.write_text(CLUSTER.replace("gpu: T4", "gpu: x9, memory: 16 GB"))
    row = {"gpu": "x9", "tp": 1, "micro_batch": 1, "forward_s": 1e-4, "backward_input_s": 2e-4}
    rows = [{"kind": kind, **row} for kind in ("embedding", "transformer", "head")]
    model = {"name": "gpt2", "arguments": list(preset("gpt2", "fp16").arguments)}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"format": 1, "model": model, "layers": rows}))
    assert run(cluster, f"{PLAN} --all-nodes --profile {path}") == 0
    said = capsys.readouterr().out
    assert "data sheets, not measured: a100-40;" in said
    assert re.search(r"on (2 big x 2, 2 small x 2|2 small x 2, 2 big x 2|.*big.*small)", said)


@pytest.mark.long
def test_layers_that_cannot_split_backwards_get_no_schedule_that_does(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def schedules(flags: str) -> set[str]:
        run(cluster, f"{MEDIUM} --pp 4 --json {flags}")
        return {row["schedule"] for row in json.loads(capsys.readouterr().out)}

    assert schedules("--attention unfused") <= {"zb-v", "zb-h1", "adaptive"}
    assert schedules("--attention fused") <= {"1f1b", "interleaved"}
    # The trainer's layers can split backward passes even if they use kernels, which are the default
    # on GPUs.
    assert schedules("--attention kernel") == schedules("") <= {"zb-v", "zb-h1", "adaptive"}
    for name in ("1f1b", "interleaved", "zb-v", "v-half", "hinted"):
        assert schedules(f"--schedules {name}") == {name}
    with pytest.raises(
        ConfigError, match="--schedules interleaved: no plan that fits into memory meets"
    ):
        schedules("--schedules interleaved --partition 6-6-6-6")


def test_a_gpu_that_nobody_knows_is_refused(cluster: Path) -> None:
    cluster.write_text(CLUSTER.replace("gpu: T4", "gpu: T44, memory: 16 GB"))
    with pytest.raises(ConfigError, match="node type small: GPU 'T44' is neither.*nearest is t4"):
        run(cluster, PLAN)


def test_clusters_without_prices_have_no_front(cluster: Path, tmp_path: Path) -> None:
    cluster.write_text(re.sub(r", price_per_hour: \d+", "", CLUSTER))
    with pytest.raises(ConfigError, match="no node type has a price; set price_per_hour"):
        run(cluster, f"{PLAN} --pareto {tmp_path}")


def test_fp8_plans_are_faster_and_for_other_programs_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def cluster(gpu: str) -> Path:
        node = {"gpu": gpu, "count": 1, "gpus_per_node": 2, "link": {"bandwidth": "400 GB/s"}}
        path = tmp_path / f"{gpu}.json"
        path.write_text(json.dumps({"format": 1, "nodes": [node]}))
        return path

    flags = "--model gpt2 --global-batch-size 8 --tp 1 --dp 2 --top 1 --attention fused"
    for more, words_of in (("", "gpt2, 124 M parameters, bf16, on"), ("--fp8", "bf16 and fp8, on")):
        assert run(cluster("h100"), f"{flags} {more}") == 0
        assert words_of in capsys.readouterr().out
    assert run(cluster("h100"), f"{flags} --fp8 --export megatron") == 0
    assert "--fp8-format hybrid" in capsys.readouterr().out
    assert run(cluster("h100"), f"{flags} --fp8 --export torchtitan") == 0
    assert 'converters = ["quantize.linear.float8"]' in capsys.readouterr().out
    for gpu, more, message in (
        ("a100", "--fp8", "a100-40 does not support fp8, only bf16"),
        ("h100", "--fp8 --precision fp16", "--fp8 requires precision bf16, got fp16"),
        (
            "h100",
            f"--fp8 --output {tmp_path / 'plan.json'}",
            "--fp8 cannot be combined with --output",
        ),
        ("h100", "--fp8 --export conf", "--fp8 cannot be combined with --export conf"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(cluster(gpu), f"{flags} {more}")


def test_layers_that_predict_further_tokens_are_in_megatron_s_layout(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"{MODELS['gpt2']} --mtp-num-layers 1 --position-embedding-type rope"
    flags = "--global-batch-size 8 --tp 1 --pp 2 --top 1 --schedules 1f1b --export megatron"
    assert main(["--cluster", str(cluster), "--model", model, *flags.split()]) == 0
    flags = shlex.split(capsys.readouterr().out)
    layout = flags[flags.index("--pipeline-model-parallel-layout") + 1]
    assert re.fullmatch(r"E(t.*)?\|(t.*)?mL", layout)
