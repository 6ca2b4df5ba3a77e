"""Reads the inputs of ``plan`` and ``plan validate``: model, cluster and measured durations.

``plan`` also accepts the lengths of documents that the trainer packs::

    data/corpus              prefix of corpus.bin and corpus.idx, as in --data-path
    lengths.txt              file with the number of tokens of each document, separated by spaces
                             or lines, or a JSON list of these numbers
    lognormal:900:1.5        lognormal distribution with this median, in tokens, and with this
                             standard deviation of the logarithm

With ``--calibrate``, ``planner.calibrate`` fits a profile to the traces of runs. This module
defines the options, and reads information that traces do not contain.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron.adaptive.config.command_parser import number
from megatron.adaptive.config.input_files import read_text
from megatron.adaptive.data.indexed import check_indexed, sequence_lengths
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.planner import profile_file
from megatron.adaptive.planner.calibrate import TracedRun, calibrate
from megatron.adaptive.planner.cluster import (
    MEMORY_MARGIN,
    Cluster,
    NodeType,
    known_gpu,
    read_cluster,
)
from megatron.adaptive.planner.documents import Lengths, make_documents
from megatron.adaptive.planner.model_description import ATTENTIONS, Model
from megatron.adaptive.planner.model_file import read_model, usual_attention
from megatron.adaptive.planner.plan import FP8_FLAGS
from megatron.adaptive.planner.profile import PlanInputs
from megatron.adaptive.planner.propose import complete_profile
from megatron.adaptive.trace.read import RunTrace, read_run
from megatron.adaptive.trace.status_files import PROGRESS_NAME, ProgressTail, progress_file

_DRAWN = 100_000
"""Number of document lengths to draw from a distribution."""
_PIECE = 1 << 20
"""Number of characters of a lengths file to split into words at a time."""
_LOGNORMAL = "lognormal"
_MOST_TOKENS = 10**9
_FLAG = "--document-lengths"


def add_input_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds the options for input files and for calibration to ``parser``.

    ``required`` states whether the model and the cluster are required.
    """
    add = parser.add_argument
    text = (
        "model name (gpt2-xl, llama2-70b, ...), trainer arguments, file, or folder with a "
        "config.json"
    )
    add("--model", required=required, help=text)
    text = "cluster file with nodes and links"
    add("--cluster", type=Path, required=required, metavar="FILE", help=text)
    text = "profile with measured durations (default: estimates)"
    add("--profile", type=Path, nargs="+", metavar="FILE", help=text)
    text = "precision of training; default: that of --profile, or the best that all GPUs support"
    add("--precision", choices=("fp32", "fp16", "bf16"), help=text)
    add("--fp8", action="store_true", help="run matmuls in fp8, as with --fp8-format hybrid")
    length = number(int, 1, 100_000_000)
    text = "tokens per sample; default: the model's, and for a config.json at most 4096"
    add("--seq-length", type=length, metavar="N", help=text)
    times = number(float, 1, 1000)
    text = "tokens of the busiest expert rank relative to the average (%(default)s)"
    add("--expert-imbalance", type=times, default=1.0, metavar="X", help=text)
    text = (
        "fused: Transformer Engine; kernel: torch's GPU kernel; unfused: attention scores are "
        "stored"
    )
    add("--attention", choices=ATTENTIONS, help=text)
    share = number(float, 0, 0.9)
    text = "fraction of each GPU's memory that plans must leave free (%(default)s)"
    add("--memory-margin", type=share, default=MEMORY_MARGIN, metavar="X", help=text)
    group = parser.add_argument_group("calibration")
    runs: dict[str, Any] = {"type": Path, "action": "append", "default": []}
    text = "fit the times of layers and links to traces of a run of this model; may be repeated"
    group.add_argument("--calibrate", **runs, metavar="TRACE_DIR", help=text)
    add_host_argument(parser)


def read_inputs(options: argparse.Namespace) -> PlanInputs:
    """Reads model, cluster and profile, and warns on stderr about unused link measurements.

    Raises:
        ConfigError: A file is missing or invalid, or the files contradict each other.
        TraceError: A trace passed to ``--calibrate`` is damaged.
    """
    document = profile_file.load_all(options.profile) if options.profile else None
    memories = {} if document is None else profile_file.of_nodes(document, "memory_bytes")
    cluster = read_cluster(options.cluster, memories).with_memory(1 - options.memory_margin)
    model = _model(options, cluster, document)
    if options.fp8:
        if document is not None or options.calibrate:
            raise ConfigError(
                "--fp8 cannot be combined with measurements taken in 16-bit precision; remove "
                "one of them"
            )
        arguments = (*model.arguments, *FP8_FLAGS)
        model = replace(model, precision=model.precision.with_fp8(), arguments=arguments)
    if document is not None:
        profile_file.check_model(document, model, " ".join(map(str, options.profile)))
        document, unknown_types = profile_file.renamed(
            document, {node_type.name: node_type.gpu for node_type in cluster.types}
        )
        if unknown_types:
            print(
                f"links measured between nodes of type {', '.join(unknown_types)} are not used, "
                "because the cluster has no nodes of this type",
                file=sys.stderr,
            )
    document = calibrated(options, model, cluster, document)
    measured = None if document is None else profile_file.make_profile(document)
    return PlanInputs(model, cluster, complete_profile(measured, model, cluster))


def _model(options: argparse.Namespace, cluster: Cluster, document: Any) -> Model:
    """Reads the description of the model, and chooses the precision of training.

    The default is the precision of the profile. Without a profile, the default is bf16 if all known
    GPUs support it, and fp16 otherwise.
    """
    parts = [known_gpu(node.gpu) for node in cluster.types]
    default = "bf16"
    if any(part is not None and "bf16" not in part.flops for part in parts):
        default = "fp16"
    if document is not None:
        default = profile_file.precision_of(document["model"])
    attention = options.attention or ("fused" if options.fp8 else None)
    attention = attention or usual_attention(on_gpus=cluster.has_known_gpus)
    return read_model(
        options.model,
        options.precision,
        default=default,
        attention=attention,
        sequence=options.seq_length,
        imbalance=options.expert_imbalance,
    )


def parse_counts(name: str, text: str | None) -> tuple[int, ...]:
    """Parses a list of positive integers, such as ``1,2,4`` in ``--tp 1,2,4``.

    Args:
        name: Name of the option, used in error messages.
        text: Value of the option, or ``None`` if the option is not set.

    Returns:
        The integers, or an empty tuple if the option is not set.

    Raises:
        ConfigError: The text is not a list of distinct positive integers.
    """
    if text is None:
        return ()
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = (0,)
    if any(count < 1 for count in counts) or len(set(counts)) < len(counts):
        raise ConfigError(
            f"{name} must be a list of different positive integers, such as 1,2,4, got {text}"
        )
    return counts


def measured_kinds(model: Model, spreads: Sequence[int]) -> tuple[str, ...]:
    """Returns the names of the layer types to measure.

    MoE layers are only included for the expert-parallel sizes in ``spreads``.

    Args:
        model: Model whose layers are measured.
        spreads: Expert-parallel sizes (numbers of ranks that share a layer's experts).
    """
    parts = [kind.partition("/") for kind in model.kinds]
    spread = {name for name, mark, _ in parts if mark}
    return tuple(
        kind
        for kind, (name, _, ranks) in zip(model.kinds, parts, strict=True)
        if int(ranks or 1) in spreads or name not in spread
    )


def add_host_argument(parser: argparse.ArgumentParser) -> None:
    """Adds to ``parser`` the option that sets the node type of a host in a traced run."""
    text = "node type of a host in these runs; required if the cluster has several node types"
    hosts: dict[str, Any] = {"action": "append", "default": [], "metavar": "HOST=TYPE"}
    parser.add_argument("--calibrate-host", **hosts, help=text)


def calibrated(
    options: argparse.Namespace, model: Model, cluster: Cluster, document: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Returns a profile whose durations are fitted to the traces passed to ``--calibrate``.

    Args:
        options: Parsed options, including those of :func:`add_input_arguments`.
        model: Model that the traced runs trained.
        cluster: Cluster that contains the node types of the runs' hosts.
        document: Content of a profile file, or ``None`` if there is no profile.

    Returns:
        Content of the profile, or ``document`` if ``--calibrate`` is not set.

    Raises:
        ConfigError: Required information about a run is missing, such as a host's node type, or the
            run trained a different model.
        TraceError: A trace is damaged.
    """
    if not options.calibrate:
        return document
    runs = traced_runs(options.calibrate, options, model, cluster)
    if document is None:
        return calibrate(model, runs)
    fitted = calibrate(model, runs, document["model"])
    return profile_file.merge([("the profile", document), ("the runs", fitted)])


def traced_runs(
    folders: Iterable[Path], options: argparse.Namespace, model: Model, cluster: Cluster
) -> list[TracedRun]:
    """Reads traced runs, including their microbatch sizes and the node types of their hosts.

    Args:
        folders: Folders of traces. The progress file of the trainer must be next to the traces.
        options: Parsed options. ``--calibrate-host`` is optional if the cluster has only one node
            type.
        model: Model that the runs trained.
        cluster: Cluster that contains the node types of the runs' hosts.

    Raises:
        ConfigError: The type of a host is missing or unknown, or the run trained a different model.
        TraceError: A trace is damaged.
    """
    types = {node.name: node for node in cluster.types}
    type_by_host: dict[str, NodeType] = {}
    for text in options.calibrate_host:
        host, sign, name = text.partition("=")
        if not (host and sign and name in types):
            raise ConfigError(
                "--calibrate-host must be HOST=TYPE with one of the cluster's types "
                f"{', '.join(types)}, got {text}"
            )
        type_by_host[host] = types[name]
    runs = []
    for folder in folders:
        trace = read_run(folder)
        hosts = sorted({rank.header.host for rank in trace.ranks.values()})
        for host in hosts:
            if host not in type_by_host and len(types) > 1:
                raise ConfigError(
                    f"{folder}: the cluster has several node types; set the type of host {host} "
                    f"with --calibrate-host {host}=TYPE"
                )
        only = cluster.types[0]
        nodes = {host: type_by_host.get(host, only) for host in hosts}
        size = _micro_batch(folder, trace, model)
        runs.append(TracedRun(trace=trace, micro_batch=size, hosts=nodes))
    return runs


def _micro_batch(folder: Path, trace: RunTrace, model: Model) -> int:
    """Returns the number of samples per microbatch, computed from the number of tokens per step.

    The number of tokens per step is read from the progress file next to the traces.
    """
    progress = ProgressTail(progress_file(folder), kept=None)
    progress.refresh()
    tokens = [
        line["tokens_per_s"] * line["step_ms"] / 1e3
        for line in progress.records
        if line.get("tokens_per_s") and line.get("step_ms")
    ]
    if not tokens:
        raise ConfigError(
            f"{folder}: {PROGRESS_NAME} next to the traces does not contain the number of tokens "
            "per step; pass the folder of a run of the trainer"
        )
    headers = [rank.header for rank in trace.ranks.values()]
    microbatches = headers[0].num_microbatches * (1 + max(header.dp_rank for header in headers))
    samples: float = median(tokens) / model.tokens_per_sample / microbatches
    size = round(samples)
    if size < 1 or abs(samples - size) > 0.05 * size:
        raise ConfigError(
            f"{folder}: a step had {median(tokens):.0f} tokens in {microbatches} microbatches, "
            f"which is not a whole number of samples of {model.tokens_per_sample} tokens each; "
            "pass the model that was trained as --model"
        )
    return size


def with_documents(inputs: PlanInputs, text: str | None, batch: int) -> PlanInputs:
    """Adds the document lengths of a run to ``inputs``, and returns the result.

    Args:
        inputs: Model, cluster and profile.
        text: Value of ``--document-lengths``, or ``None`` if the option is not set.
        batch: Number of documents per step.

    Raises:
        ConfigError: The lengths cannot be read, or the trainer cannot pack documents for this
            model.
    """
    if text is None:
        return inputs
    lengths, longest = read_lengths(text, inputs.model.sequence)
    documents = make_documents(inputs.model, lengths, batch, longest=longest)
    return replace(inputs, documents=documents)


def read_lengths(text: str, most: int) -> tuple[Lengths, int]:
    """Reads the lengths of documents from the value of ``--document-lengths``.

    Args:
        text: Value of the option.
        most: Maximum length of a document in tokens. The trainer truncates longer documents.

    Returns:
        Two values: the number of tokens that the trainer predicts in each document, and an upper
        bound of these numbers.

    Raises:
        ConfigError: The text does not have one of the possible forms, or a length is invalid.
        DataError: The token file is damaged.
    """
    if text.partition(":")[0] == _LOGNORMAL:
        return _lognormal(text, most), most
    if Path(f"{text}.idx").is_file():
        check_indexed(text)
        # A sample is one token shorter than its document, because the last token is only a label.
        sizes = sequence_lengths(text)
        lengths: Lengths = sizes[sizes > 1] - 1
    else:
        lengths = _listed(text)
    if not len(lengths):
        raise ConfigError(
            f"{_FLAG} {text} contains no document that is long enough to train on; pass other data"
        )
    lengths = np.minimum(lengths, most)
    return lengths, int(lengths.max())


def _lognormal(text: str, most: int) -> Lengths:
    try:
        median, sigma = map(float, text.split(":")[1:])
    except ValueError:
        median = sigma = math.nan
    if not (1 <= median <= _MOST_TOKENS and 0 <= sigma <= 10):
        raise ConfigError(
            f"{_FLAG} must be {_LOGNORMAL}:MEDIAN:SIGMA with a median of at least 1 token and a"
            f" sigma from 0 to 10, got {text}; for example {_LOGNORMAL}:900:1.5"
        )
    drawn = np.random.default_rng(0).lognormal(math.log(median), sigma, _DRAWN)
    return np.clip(drawn, 1, most).astype(np.int32)


def _listed(text: str) -> Lengths:
    """Returns the numbers in the file whose path is ``text``.

    The file contains a JSON list, or numbers separated by whitespace.
    """
    content = read_text(
        Path(text),
        f"{_FLAG}: pass the prefix of a .bin and .idx file, a file of lengths, or "
        "lognormal:MEDIAN:SIGMA",
    )
    content = content.strip().removeprefix("[").removesuffix("]")
    numbered = enumerate(_words(content.replace(",", " ").replace("\n", " ")), start=1)
    lengths = (_number(word, number, text) for number, word in numbered)
    return np.fromiter(lengths, dtype=np.int32)


def _words(content: str) -> Iterator[str]:
    """Yields the words of ``content``. Splits the text piece by piece, to save memory."""
    end = 0
    while end < len(content):
        start = end
        end = content.find(" ", start + _PIECE)
        end = len(content) if end < 0 else end
        yield from content[start:end].split()


def _number(word: str, number: int, text: str) -> int:
    length: Any = int(word) if word.isdecimal() and len(word) < 12 else 0
    if not 1 <= length <= _MOST_TOKENS:
        raise ConfigError(
            f"{_FLAG} {text}: each number in the file must be from 1 to {_MOST_TOKENS}, but number"
            f" {number} is {word[:40]}; correct it"
        )
    return int(length)
