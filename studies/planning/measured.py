"""Compares the cost model with published runs: errors, ranking, best plan and memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.report import Row
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner.calibrate import accuracy
from megatron.adaptive.planner.cluster import make_cluster
from megatron.adaptive.planner.cost import predict
from megatron.adaptive.planner.model_file import arguments_model
from megatron.adaptive.planner.plan import Plan, Prediction, place_ranks
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import complete_profile
from studies.planning.published.files import MeasuredRun
from studies.planning.published.rows import read_rows
from studies.planning.published.staged import read_staged

_FORMS: dict[str, Callable[[Path, str], list[MeasuredRun]]] = {
    ".csv": read_rows,
    ".json": read_staged,
}
"""Functions that read files named ``measured_NAME``, keyed by the suffix of the file.

The modules of these functions describe the file formats.
"""


def read_sets(folder: Path) -> dict[str, list[MeasuredRun]]:
    """Reads all data sets in ``folder`` and in its direct subfolders.

    Args:
        folder: Folder with a data set, or folder whose subfolders contain data sets.

    Raises:
        ConfigError: The folder does not exist or contains no data set, or a file in it is invalid.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist; pass the folder of the data set")
    found: dict[str, list[MeasuredRun]] = {}
    below = sorted(one for one in folder.iterdir() if one.is_dir())
    for place in (folder.resolve(), *below):
        for file in sorted(place.glob("measured_*")):
            if file.suffix in _FORMS:
                name = file.stem.removeprefix("measured_")
                found[f"{place.name} {name}"] = _read(file, name)
    if not found:
        raise ConfigError(
            f"{folder} has no data set; the folder or a subfolder must contain measured_NAME.csv or"
            " measured_NAME.json"
        )
    return found


def _read(file: Path, name: str) -> list[MeasuredRun]:
    try:
        return _FORMS[file.suffix](file.parent, name)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file} and its data set cannot be read ({type(error).__name__}: {error}); "
            "docs/reference/planner.md describes the formats of data sets"
        ) from error


def rows(data: Path) -> list[Row]:
    """Compares predictions with the runs of all data sets in ``data``, and returns table rows.

    Args:
        data: Folder of the published data sets. There are no rows for missing data sets.
    """
    return [row for name, runs in read_sets(data).items() for row in _set(name, runs)]


def errors_of(runs: Sequence[MeasuredRun]) -> tuple[dict[str, float], list[float]]:
    """Compares predictions with measured runs, and returns the accuracy of times and memory."""
    pairs = [(run.predicted(), run) for run in runs]
    timed = [(seen.seconds, run.seconds) for seen, run in pairs if run.seconds is not None]
    if not timed:
        raise ConfigError("no run has a time, so predictions cannot be compared")
    peaks = [seen.peak_bytes / run.peak_bytes - 1 for seen, run in pairs if run.peak_bytes]
    predicted, measured = zip(*timed, strict=True)
    return accuracy(predicted, measured), peaks


def _set(name: str, runs: Sequence[MeasuredRun]) -> Iterator[Row]:
    found, errors = errors_of(runs)
    name = f"{name}, {found['runs']} runs"
    yield Row(what=f"{name}: median error of the time", value=found["median_error"], goal=0.10)
    yield Row(what=f"{name}: mean error", value=found["mean_error"])
    yield Row(what=f"{name}: worst error", value=found["worst_error"])
    order, place = found["rank_correlation"], found["place_of_best"]
    yield Row(what=f"{name}: rank correlation", value=order, goal=0.9, least=True)
    yield Row(what=f"{name}: predicted place of the fastest", value=place, goal=3)
    yield Row(what=f"{name}: regret of the predicted fastest", value=found["regret"], goal=0.03)
    if errors:
        what = f"{name}: worst error of the memory of {len(errors)} runs"
        yield Row(what=what, value=max(abs(error) for error in errors), goal=0.15)


def literature_rows() -> list[Row]:
    """Predicts the runs in ``literature.yaml`` from data sheets, and returns the errors."""
    document = yaml.safe_load(Path(__file__).with_name("literature.yaml").read_text("utf-8"))
    errors, unfit, rows = [], 0, []
    for run in document["runs"]:
        for recompute, measured in (run.get("step_s") or run["tflops"]).items():
            inputs, seen = literature_run(document["clusters"][run["cluster"]], run, recompute)
            if "tflops" in run:
                model = inputs.model
                work = sum(model.layer(i).forward_flops for i in range(model.num_layers))
                gpus = run["tp"] * run["dp"] * run["pp"]
                error = measured / (3 * work * run["batch"] / seen.seconds / gpus / 1e12) - 1
                what = f"{run['name']} on {gpus} GPUs: error of the time"
                rows.append(Row(what=what, value=abs(error), goal=0.1, note=f"{error:+.1%}"))
            else:
                errors.append(abs(seen.seconds / measured - 1))
                unfit += not seen.fits
    name = f"{len(errors)} runs of the literature"
    rows.append(Row(what=f"{name}: median error", value=statistics.median(errors), goal=0.1))
    rows.append(Row(what=f"{name}: refused for memory", value=unfit, goal=0))
    return rows


def literature_run(
    cluster: Mapping[str, Any], run: Mapping[str, Any], recompute: str
) -> tuple[PlanInputs, Prediction]:
    """Predicts a run in which layers are divided evenly. Returns the inputs and the prediction."""
    tp, dp, pp, chunks = run["tp"], run["dp"], run["pp"], run["chunks"]
    count = tp * dp * pp // 8
    node = {"gpu": cluster["gpu"], "count": count, "gpus_per_node": 8, "link": cluster["link"]}
    made = make_cluster(
        {"format": 1, "nodes": [node], "network": cluster["network"]}, "literature", {}
    )
    words = run["model"].split()
    attention = "fused" if "--use-flash-attn" in words else "unfused"
    model = arguments_model(words, run["name"], run["precision"], attention=attention)
    # The first and the last stage have fewer layers, because they also contain the embedding and
    # the output layer.
    each, more = divmod(model.num_counted, pp * chunks)
    full = range((pp * chunks - more) // 2, (pp * chunks - more) // 2 + more)
    layers = [each + (stage in full) for stage in range(pp * chunks)]
    layers[0] += 1
    layers[-1] += 1
    plan = Plan(
        tp=tp,
        dp=dp,
        pp=pp,
        chunks=chunks,
        micro_batch=run["micro_batch"],
        global_batch=run["batch"],
        schedule="1f1b" if chunks == 1 else "interleaved",
        recompute=recompute,
        sequence_parallel=recompute != "full",
        distributed_optimizer=run.get("sharded", False),
        overlap_reduce=run.get("sharded", False),
        partition=tuple(layers),
        places=place_ranks(made, range(count), tp=tp, dp=dp, pp=pp, micro_batch=run["micro_batch"]),
    )
    inputs = PlanInputs(model, made, complete_profile(None, model, made))
    return inputs, predict(plan, inputs)
