"""Tests the format of log lines, which existing tools can parse, and the files for TensorBoard."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import math
import os
import pty
import re
import socket
import struct
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.adaptive import accelerator
from megatron.adaptive.accelerator import Accelerator
from megatron.adaptive.config.arguments import parse
from megatron.adaptive.config.environment import Installed
from megatron.adaptive.config.trainer import TrainerConfig
from megatron.adaptive.errors import ConfigError

accelerator.install()

from megatron.adaptive.gpt.build_model import flops_per_token  # noqa: E402
from megatron.adaptive.training.loggers.prometheus_logger import TOKEN_VARIABLE, PrometheusEndpoint  # noqa: E402
from megatron.adaptive.training.logging import IterationReport, TrainingLog, startup_line  # noqa: E402

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --train-iters 50 "
    "--lr 1e-3 --mock-data --vocab-size 100 --log-interval 2"
)
CPU = Accelerator(device=torch.device("cpu"), backend="gloo", name="CPU")
# The tests use only the name of this device, so no GPU is needed.
H200 = Accelerator(device=torch.device("cuda", 0), backend="nccl", name="NVIDIA H200")

Scalars = dict[str, list[tuple[int, float]]]


def settings(flags: str = "", world_size: int = 1) -> TrainerConfig:
    installed = Installed(transformer_engine=True)
    argv = f"{SMALL} {flags}".split()
    return parse(argv, world_size=world_size, last_wins=True, installed=installed)


def report(iteration: int, **changes: Any) -> IterationReport:
    plain = IterationReport(
        iteration=iteration,
        consumed_samples=16 * iteration,
        elapsed_s=0.5,
        learning_rate=1.5e-4,
        global_batch_size=16,
        losses={"lm loss": 9.0 + iteration},
        loss_scale=1.0,
        grad_norm=1.234,
        updated=True,
        num_zeros=None,
        bubble_fraction=None,
        params_norm=None,
        memory_bytes=1000,
        peak_memory_bytes=2000 + iteration,
    )
    return dataclasses.replace(plain, **changes)


def make_log(
    cfg: TrainerConfig, stream: io.StringIO, *, accelerator: Accelerator = CPU, **changes: Any
) -> TrainingLog:
    options: dict[str, Any] = {"is_writer": True, "total_iterations": 50, "start_iteration": 0}
    return TrainingLog(cfg, accelerator=accelerator, stream=stream, **{**options, **changes})


def test_averages_go_on_where_another_rank_writes() -> None:
    streams = [io.StringIO(), io.StringIO()]
    logs = [make_log(settings(), streams[rank], is_writer=rank == 0) for rank in range(2)]
    for log in logs:
        log.iteration(report(1))
    gathered: list[object] = []

    def gather(value: object) -> list[object]:
        gathered.append(value)
        return gathered

    logs[0].hand_over(1, is_writer=False, gather=gather)
    logs[1].hand_over(1, is_writer=True, gather=gather)
    for log in logs:
        log.iteration(report(2))
    assert streams[0].getvalue() == ""
    assert "iteration        2/" in streams[1].getvalue()
    # The logged loss must be the mean of the losses 10 and 11.
    assert "lm loss: 1.050000E+01" in streams[1].getvalue()


def printed(
    *reports: IterationReport, flags: str = "", world_size: int = 1, accelerator: Accelerator = CPU
) -> list[str]:
    """Returns the lines that the log prints for ``reports`` about iterations.

    ``flags`` contains flags of the trainer. The job has ``world_size`` ranks on devices of the kind
    ``accelerator``.
    """
    stream = io.StringIO()
    log = make_log(settings(flags, world_size), stream, accelerator=accelerator)
    for each in reports:
        log.iteration(each)
    log.close()
    return stream.getvalue().splitlines()


def fields(line: str) -> dict[str, str]:
    """Returns the values in ``line`` of the log, by name."""
    parts = line.removesuffix(" |").split(" | ")[1:]
    return {name: value.strip() for name, value in (part.split(": ", 1) for part in parts)}


def scalars(folder: Path) -> Scalars:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


class TestStartupLine:
    def test_is_megatrons(self) -> None:
        flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
        assert startup_line(settings(flags, world_size=4)) == (
            "using world size: 4, data-parallel-size: 1, tensor-model-parallel size: 2, "
            "pipeline-model-parallel size: 2"
        )

    def test_context_parallel_size_leaves_the_beginning_as_it_is(self) -> None:
        flags = "--context-parallel-size 2 --transformer-impl transformer_engine"
        assert startup_line(settings(flags, world_size=4)) == (
            "using world size: 4, data-parallel-size: 2, tensor-model-parallel size: 1, "
            "pipeline-model-parallel size: 1, context-parallel size: 2"
        )


class TestLine:
    def test_is_megatrons_up_to_our_own_fields(self) -> None:
        (line,) = printed(report(1), report(2))
        date, rest = line[:22], line[22:]
        assert re.fullmatch(r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]", date)
        assert rest == (
            " iteration        2/      50 | consumed samples:           32 | "
            "elapsed time per iteration (ms): 500.0 | learning rate: 1.500000E-04 | "
            "global batch size:    16 | lm loss: 1.050000E+01 | loss scale: 1.0 | "
            "grad norm: 1.234 | number of skipped iterations:   0 | "
            "number of nan iterations:   0 | tokens/s/rank: 1024.0 |"
        )

    def test_comes_once_an_interval_and_starts_anew_after_it(self) -> None:
        reports = [report(1, elapsed_s=9.0, updated=False), *map(report, range(2, 8))]
        lines = printed(*reports)
        assert [re.findall(r"iteration +(\d+)/", line) for line in lines] == [["2"], ["4"], ["6"]]
        logged = fields(lines[1])
        assert logged["elapsed time per iteration (ms)"] == "500.0"
        assert logged["lm loss"] == "1.250000E+01"
        assert logged["number of skipped iterations"] == "0"
        # If a run resumes after iteration 5, the line covers only iteration 6.
        (resumed,) = printed(report(6, elapsed_s=0.25))
        assert fields(resumed)["elapsed time per iteration (ms)"] == "250.0"
        assert fields(resumed)["lm loss"] == "1.500000E+01"

    def test_losses_of_skipped_iterations_are_left_out(self) -> None:
        bad = report(1, losses={"lm loss": math.inf}, updated=False, grad_norm=None)
        none = fields(printed(bad, dataclasses.replace(bad, iteration=2))[0])
        assert not {"lm loss", "grad norm"} & set(none)
        logged = fields(printed(bad, report(2))[0])
        assert logged["lm loss"] == "1.100000E+01"
        assert logged["number of skipped iterations"] == "1"
        assert logged["number of nan iterations"] == "1"
        assert logged["elapsed time per iteration (ms)"] == "500.0"

    def test_has_every_loss_and_the_optional_norms_in_megatrons_order(self) -> None:
        losses = {"lm loss": 2.0, "z loss": 0.5}
        first = report(1, losses=losses, num_zeros=7, params_norm=3.5, bubble_fraction=0.15)
        last = dataclasses.replace(first, iteration=2, bubble_fraction=None)
        (line,) = printed(first, last)
        order = ["lm loss", "z loss", "loss scale", "grad norm", "num zeros", "params norm"]
        assert [name for name in fields(line) if name in order] == order
        assert fields(line)["num zeros"] == "7"
        assert fields(line)["params norm"] == "3.500"
        # The line contains the mean of the values that are known.
        assert line.endswith("| bubble: 15.0% |")

    def test_tokens_of_a_batch_that_grows(self) -> None:
        logged = fields(
            printed(
                report(1, global_batch_size=8),
                report(2, global_batch_size=24, elapsed_s=1.5),
                flags="--pipeline-model-parallel-size 4",
                world_size=4,
            )[0]
        )
        assert logged["tokens/s/rank"] == f"{32 * 32 / 2.0 / 4:.1f}"
        assert logged["global batch size"] == "24"

    def test_throughput_only_where_asked(self) -> None:
        cfg = settings("--log-throughput")
        (line,) = printed(*(report(i, elapsed_s=1e-5) for i in (1, 2)), flags="--log-throughput")
        tflops = flops_per_token(cfg) * 16 * 32 / 1e-5 / 1e12
        assert list(fields(line))[1:3] == [
            "elapsed time per iteration (ms)",
            "throughput per GPU (TFLOP/s/GPU)",
        ]
        assert fields(line)["throughput per GPU (TFLOP/s/GPU)"] == f"{tflops:.1f}"
        assert "throughput" not in printed(report(2))[0]

    def test_utilization_on_a_gpu_whose_peak_is_known(self) -> None:
        (line,) = printed(report(2, elapsed_s=1e-5), accelerator=H200)
        share = flops_per_token(settings()) * 16 * 32 / 1e-5 / 989.5e12
        assert line.endswith(f"| MFU: {share:.1%} |")
        unknown = dataclasses.replace(H200, name="NVIDIA Unheard-of 1")
        assert "MFU" not in printed(report(2), accelerator=unknown)[0]

    def test_an_iteration_too_short_to_measure_is_no_error(self) -> None:
        (line,) = printed(report(2, elapsed_s=0.0), flags="--log-throughput")
        assert fields(line)["tokens/s/rank"] == "0.0"


class TestValidation:
    def test_is_megatrons_between_dashes(self) -> None:
        stream = io.StringIO()
        make_log(settings(), stream).validation(100, "iteration 100", {"lm loss": 5.1})
        top, line, bottom = stream.getvalue().splitlines()
        assert line == (
            " validation loss at iteration 100 | lm loss value: 5.100000E+00 | "
            f"lm loss PPL: {math.exp(5.1):.6E} | "
        )
        assert top == bottom == "-" * (len(line) + 1)

    @pytest.mark.parametrize(("loss", "ppl"), [(1e9, f"{math.exp(20):.6E}"), (math.nan, "NAN")])
    def test_a_hopeless_loss_is_no_error(self, loss: float, ppl: str) -> None:
        stream = io.StringIO()
        make_log(settings(), stream).validation(1, "iteration 1", {"lm loss": loss})
        assert f"lm loss PPL: {ppl} |" in stream.getvalue()


def test_only_the_writer_writes(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = make_log(settings(f"--tensorboard-dir {tmp_path}"), stream, is_writer=False)
    log.iteration(report(2))
    log.validation(2, "iteration 2", {"lm loss": 1.0})
    log.message("hello")
    log.close()
    assert stream.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def test_lines_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that the log uses standard output, and shows a progress bar only on a terminal."""
    log = TrainingLog(
        settings(), is_writer=True, accelerator=CPU, total_iterations=1, start_iteration=0
    )
    log.message("saved")
    log.iteration(report(1))
    log.close()
    log.close()
    captured = capsys.readouterr()
    assert captured.out == "saved\n"
    assert captured.err == ""


class TestTensorBoard:
    def write(self, folder: Path, flags: str = "", accelerator: Accelerator = CPU) -> Scalars:
        cfg = settings(f"--tensorboard-dir {folder} {flags}")
        log = make_log(cfg, io.StringIO(), accelerator=accelerator)
        for iteration in range(1, 5):
            log.iteration(report(iteration, bubble_fraction=0.125))
        log.validation(4, "iteration 4", {"lm loss": 2.0})
        log.validation(4, "iteration 4 on test set", {"lm loss": 3.0})
        log.close()
        return scalars(folder)

    def test_has_what_every_run_has(self, tmp_path: Path) -> None:
        curves = self.write(tmp_path)
        assert set(curves) == {
            *("lm loss", "learning-rate", "loss-scale", "grad-norm"),
            *("lm loss validation", "lm loss test"),
            *("tokens-per-s-per-rank", "bubble-fraction", "peak-memory-bytes"),
        }
        assert curves["lm loss"] == [(1, 10.0), (2, 11.0), (3, 12.0), (4, 13.0)]
        assert curves["learning-rate"][0] == (1, pytest.approx(1.5e-4))
        assert curves["tokens-per-s-per-rank"][0] == (1, 1024.0)
        assert curves["bubble-fraction"][0] == (1, 0.125)
        assert curves["peak-memory-bytes"][-1] == (4, 2004.0)
        assert curves["lm loss validation"] == [(4, 2.0)]
        assert curves["lm loss test"] == [(4, 3.0)]

    def test_flags_add_curves(self, tmp_path: Path) -> None:
        curves = self.write(
            tmp_path,
            "--log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-throughput "
            "--log-validation-ppl-to-tensorboard --log-memory-to-tensorboard "
            "--log-world-size-to-tensorboard",
        )
        assert curves["iteration-time"][0] == (1, 0.5)
        assert curves["batch-size"][0] == (1, 16.0)
        assert curves["world-size"][0] == (1, 1.0)
        assert curves["mem-allocated-bytes"][0] == (1, 1000.0)
        assert curves["mem-max-allocated-bytes"][0] == (1, 2001.0)
        assert curves["throughput"][0][1] > 0
        assert curves["lm loss validation ppl"] == [(4, pytest.approx(math.exp(2.0)))]

    def test_flags_take_curves_and_points_away(self, tmp_path: Path) -> None:
        flags = "--no-log-learning-rate-to-tensorboard --no-log-loss-scale-to-tensorboard"
        flags += " --tensorboard-log-interval 3 --log-interval 100"
        curves = self.write(tmp_path, flags, accelerator=H200)
        assert not any("learning-rate" in tag or "loss-scale" in tag for tag in curves)
        assert curves["lm loss"] == [(3, 12.0)]
        share = flops_per_token(settings()) * 1024 / 989.5e12
        assert curves["model-flops-utilization"][0] == (3, pytest.approx(share))

    def test_a_second_run_adds_to_the_first(self, tmp_path: Path) -> None:
        cfg = settings(f"--tensorboard-dir {tmp_path}")
        for iterations in ((1, 2, 3), (3, 4)):
            log = make_log(cfg, io.StringIO(), start_iteration=iterations[0] - 1)
            for iteration in iterations:
                log.iteration(report(iteration))
            log.close()
        curves = scalars(tmp_path)
        assert [step for step, _ in curves["lm loss"]] == [1, 2, 3, 3, 4]

    def test_a_folder_that_cannot_be_made_is_one_line(self, tmp_path: Path) -> None:
        cfg = settings(f"--tensorboard-dir {tmp_path / 'taken'}")
        (tmp_path / "taken").write_text("a file")
        with pytest.raises(ConfigError, match="--tensorboard-dir") as caught:
            make_log(cfg, io.StringIO())
        assert len(str(caught.value).splitlines()) == 1


class TestBar:
    def open_terminal(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
        """Replaces standard error with a terminal, and returns a function that reads its output.

        The returned function also closes the terminal.

        This is no fixture, because pytest replaces standard error after fixtures are set up.
        """
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        monkeypatch.setattr(sys, "stderr", os.fdopen(slave, "w"))

        def read() -> str:
            sys.stderr.close()
            text = b""
            # Linux raises an error at the end of a closed terminal's output.
            with contextlib.suppress(OSError):
                while part := os.read(master, 1 << 16):
                    text += part
            os.close(master)
            return text.decode()

        return read

    def test_shows_loss_and_speed_and_goes_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = self.open_terminal(monkeypatch)
        stream = io.StringIO()
        log = make_log(settings(), stream, start_iteration=10)
        # The bar is drawn at most ten times per second, so wait before the next update.
        time.sleep(0.15)
        log.iteration(report(11))
        log.message("in between")
        log.close()
        shown = terminal()
        assert "10/50" in shown
        assert "11/50" in shown
        assert "loss=20.000" in shown
        assert "tokens/s=1024" in shown
        assert shown.endswith("\r"), "the line of the bar must be empty at the end"
        assert shown.rstrip("\r").rsplit("\r", 1)[-1].isspace()
        assert stream.getvalue() == "in between\n"

    def test_lines_on_the_same_terminal_do_not_tear(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = self.open_terminal(monkeypatch)
        log = make_log(settings(), sys.stderr)  # type: ignore[arg-type]
        for iteration in range(1, 5):
            log.iteration(report(iteration))
        log.close()
        # After a carriage return, a terminal overwrites the line from its start.
        lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in terminal().split("\n")]
        reports = [line for line in lines if "consumed samples" in line]
        assert len(reports) == 2
        assert all(re.match(r" \[.*\] iteration .* \|$", line) for line in reports)


class TestOtherLoggers:
    def log(self, flags: str) -> None:
        log = make_log(settings(flags), io.StringIO())
        for iteration in range(1, 4):
            log.iteration(report(iteration))
        log.report(findings=[{"name": "slow rank 1", "gain": 0.25, "do": "move a layer"}])
        log.ends("all iterations are done")
        log.close()

    def test_weights_and_biases_offline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        flags = "--wandb-project made --wandb-exp-name first --wandb-entity team"
        self.log(f"{flags} --wandb-save-dir {tmp_path}")
        (file,) = tmp_path.rglob("*.wandb")
        # The file is written by a separate process, so wait until it contains all values.
        expected = (b"lm loss", b"gain/slow rank 1", b"findings", b"made", b"first", b"team")
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            content = file.read_bytes()
            if all(word in content for word in expected):
                break
            time.sleep(0.1)
        for word in expected:
            assert word in content
        assert list(tmp_path.rglob("findings*.table.json"))
        assert "receives no more values" not in capsys.readouterr().err

    def test_mlflow_into_a_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("mlflow")
        monkeypatch.setenv(
            "MLFLOW_ALLOW_FILE_STORE", "true"
        )  # Newer versions of MLflow require this variable, because they prefer a database.
        flags = "--mlflow-experiment made --mlflow-run-name attempt-7"
        self.log(f"{flags} --mlflow-tracking-uri file://{tmp_path}")
        (points,) = tmp_path.rglob("metrics/lm loss")
        # A background thread writes the values, in any order.
        values = [line.split()[1:] for line in points.read_text().splitlines()]
        assert sorted(values) == [["10.0", "1"], ["11.0", "2"], ["12.0", "3"]]
        (name,) = tmp_path.rglob("tags/mlflow.runName")
        assert name.read_text() == "attempt-7"
        (artifact,) = tmp_path.rglob("findings.json")
        assert json.loads(artifact.read_text())[0]["gain"] == 0.25
        assert "receives no more values" not in capsys.readouterr().err

    def test_prometheus_reads_the_last_values(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parser = pytest.importorskip("prometheus_client.parser")
        file = tmp_path / "run.prom"
        flags = f"--prometheus-address 127.0.0.1:0 --prometheus-file {file}"
        monkeypatch.setenv(TOKEN_VARIABLE, "xyz")
        ports: list[int] = []
        opened = PrometheusEndpoint.__init__

        def opens(endpoint: PrometheusEndpoint, cfg: TrainerConfig) -> None:
            opened(endpoint, cfg)
            ports.append(endpoint.port)

        monkeypatch.setattr(PrometheusEndpoint, "__init__", opens)
        log = make_log(settings(flags), io.StringIO())
        log.iteration(report(1))
        log.iteration(report(2))
        url = f"http://127.0.0.1:{ports[0]}/metrics"
        for header in ({}, {"Authorization": "Bearer xyZ"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(url, headers=header), timeout=20)
        right = urllib.request.Request(url, headers={"Authorization": "Bearer xyz"})
        texts = [urllib.request.urlopen(right, timeout=20).read().decode()]
        log.close()
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(right, timeout=20)
        texts.append(file.read_text())
        for text in texts:
            families = parser.text_string_to_metric_families(text)
            values = {family.name: family.samples[0].value for family in families}
            assert values["megatron_adaptive_lm_loss"] == 11.0
            assert values["megatron_adaptive_iteration"] == 2

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ("--prometheus-address 0.0.0.0:0", f"set {TOKEN_VARIABLE}"),
            ("--prometheus-address nothing", r"use \[HOST:\]PORT"),
            ("--prometheus-address 70000", r"use \[HOST:\]PORT"),
            ("--prometheus-file /nowhere/run.prom", "choose a file in a writable folder"),
        ],
    )
    def test_an_address_that_cannot_be_opened(self, flags: str, message: str) -> None:
        pytest.importorskip("prometheus_client")
        with pytest.raises(ConfigError, match=message):
            make_log(settings(flags), io.StringIO())

    def test_a_port_in_use_is_named(self) -> None:
        pytest.importorskip("prometheus_client")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with pytest.raises(ConfigError, match=f"cannot open --prometheus-address {port}"):
                make_log(settings(f"--prometheus-address {port}"), io.StringIO())

    def test_the_dashboard_draws_values_that_exist(self, tmp_path: Path) -> None:
        pytest.importorskip("prometheus_client")
        file = tmp_path / "run.prom"
        log = make_log(
            settings(f"--prometheus-file {file} --log-timers-to-tensorboard"), io.StringIO()
        )
        log.iteration(report(2, bubble_fraction=0.25, grad_norm=1.0))
        log.close()
        exported = set(re.findall(r"^(\w+) ", file.read_text(), flags=re.MULTILINE))
        path = Path(__file__).parents[2] / "examples" / "grafana" / "dashboard.json"
        panels = json.loads(path.read_text())["panels"]
        drawn = {target["expr"].split("{")[0] for panel in panels for target in panel["targets"]}
        assert len(drawn) >= 5
        assert drawn <= exported

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for package, flag in (("wandb", "--wandb-project"), ("mlflow", "--mlflow-experiment")):
            monkeypatch.setitem(sys.modules, package, None)
            with pytest.raises(ConfigError, match=f"{flag} needs the package {package}"):
                make_log(settings(f"{flag} x"), io.StringIO())


def test_the_bubble_of_a_shared_gpu_is_called_a_time_slice() -> None:
    shared = dataclasses.replace(CPU, shares=2)
    (line,) = printed(report(2, bubble_fraction=0.25), accelerator=shared)
    assert "bubble: 25.0% (time slices of a shared GPU)" in line
    assert "slices" not in printed(report(2, bubble_fraction=0.25))[0]
