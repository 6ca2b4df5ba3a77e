"""Tests that public functions declare their parameters explicitly.

An entry point such as ``Pipeline`` lists its parameters, and passes them to a dataclass of settings
or to another function. Therefore, the defaults and descriptions of these parameters are written
twice, and both copies must be equal.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive import accelerator

accelerator.install()  # This call must precede the import of megatron-core.

from megatron.adaptive.config.schema_files import forms  # noqa: E402
from megatron.adaptive.modules.assembly import PipelineOptions, PipelineSettings  # noqa: E402
from megatron.adaptive.modules.pipeline import Pipeline  # noqa: E402
from megatron.adaptive.modules.step_loop import Loop  # noqa: E402
from megatron.adaptive.planner import profile_file  # noqa: E402
from megatron.adaptive.planner.choose_partition import choose_together  # noqa: E402
from megatron.adaptive.plugin import install  # noqa: E402
from megatron.adaptive.plugin.settings import Settings  # noqa: E402
from megatron.adaptive.schedule.catalog import Candidate, make_policies  # noqa: E402
from megatron.adaptive.schedule.choose_by_simulation import choose  # noqa: E402
from megatron.adaptive.schedule.rank_state import RankState  # noqa: E402
from megatron.adaptive.schedule.simulate import simulate  # noqa: E402
from megatron.adaptive.schedule.workload import StageProfile, draw  # noqa: E402
from megatron.adaptive.transport.gloo import GlooTransport  # noqa: E402
from megatron.adaptive.transport.nccl import NcclTransport  # noqa: E402

PACKAGE = Path(__file__).parent.parent / "megatron" / "adaptive"

ANY_NAMES = {
    "cluster/connection.py Connection.send": "entries of a message",
    "cluster/membership.py Membership.ask": "entries of a message",
    "config/megatron_core_flags.py CoreConfig.__init__": "fields that megatron-core declares",
    "engine/tracing.py OutsideTrace.__call__": "arguments of megatron-core's function",
    "gpt/attention.py LocalAttention.__init__": "arguments of megatron-core's class",
    "gpt/attention.py LocalAttention.forward": "arguments of megatron-core's class",
    "gpt/build_model.py KeyedExperts.__init__": "arguments of megatron-core's class",
    "gpt/build_model.py KeyedTransformerLayer.__init__": "arguments of megatron-core's class",
    "gpt/forward.py HalfPrecisionChunk.forward": "arguments of the wrapped model",
    "gpt/grouped_experts.py KeyedGroupedExperts.__init__": "arguments of megatron-core's class",
    "gpt/local_layers.py GroupRouter.__init__": "arguments of megatron-core's class",
    "gpt/local_layers.py LocalLatentAttention.__init__": "arguments of megatron-core's class",
    "gpt/local_layers.py LocalNorm.__new__": "arguments of megatron-core's class",
    "gpt/local_layers.py VariedLayer.__init__": "arguments of megatron-core's class",
    "modules/recorder.py MappedFunction.__call__": "arguments of the mapped function",
    "modules/batch.py require_whole": "settings to check, under the names in its message",
    "plugin/patch.py Seam.__call__": "arguments of megatron-core's function",
    "plugin/settings.py Settings.require": "settings of a model, which the user's program declares",
    "trace/read.py RankTrace.of_tables": "fields of TraceHeader, from files of other programs",
    "trace/views/page.py encode": "values of a block of the page",
}
"""Public functions that accept any keyword arguments, with the meaning of these arguments."""


def _public_functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yields the name and AST node of each public function and method in the file ``path``."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Any]]:
        for node in body:
            name = getattr(node, "name", "")
            is_private = name.startswith("_") and not name.startswith("__")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_private:
                yield prefix + name, node
            elif isinstance(node, ast.ClassDef) and not is_private:
                yield from walk(node.body, f"{prefix}{name}.")
            elif isinstance(node, ast.If | ast.With | ast.Try):
                yield from walk(node.body, prefix)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")).body, "")


def test_public_functions_write_out_their_parameters() -> None:
    hidden = {
        f"{path.relative_to(PACKAGE)} {name}"
        for path in PACKAGE.rglob("*.py")
        for name, function in _public_functions(path)
        if (more := function.args.kwarg) is not None
        and more.annotation is not None
        and ast.unparse(more.annotation) == "Any"
    }
    assert hidden == ANY_NAMES.keys(), (
        "list the parameters explicitly, or add a reason to ANY_NAMES"
    )


def test_an_ignored_type_error_has_a_code_and_a_reason() -> None:
    without = [
        f"{path.relative_to(PACKAGE)}:{number + 1}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for lines in [path.read_text(encoding="utf-8").splitlines()]
        for number, line in enumerate(lines)
        if (ignore := re.search(r"# type: ignore(\[[a-z, -]+\])?(  # \w.*)?$", line)) is not None
        and (
            ignore[1] is None
            or (ignore[2] is None and not lines[number - 1].lstrip().startswith("# "))
        )
    ]
    assert without == [], "add the error code, and the reason as a comment behind or above the line"


def _glosses(subject: Any, section: str) -> dict[str, str]:
    """Returns the description of each entry below ``section`` in the docstring of ``subject``."""
    text = inspect.getdoc(subject) or ""
    begin = re.search(rf"^{section}:\n", text, re.MULTILINE)
    if begin is None:
        return {}
    block = re.split(r"^\S", text[begin.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", block, re.MULTILINE)
    return {name: " ".join(gloss.split()) for name, gloss in entries}


def _class_glosses(kind: type) -> dict[str, str]:
    """Returns the descriptions of the attributes of ``kind``, including inherited attributes."""
    merged: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base is not object:
            merged |= _glosses(base, "Attributes")
    return merged


@pytest.mark.parametrize(
    ("entry", "settings", "leaves_out"),
    [
        (install, Settings, {"model"}),
        (Pipeline, PipelineSettings, set()),
        (Pipeline.loop, Loop, {"pipeline", "self"}),
        (make_policies, Candidate, {"num_microbatches"}),
        (simulate, RankState, {"policies", "times", "seed", "compiled", "rank"}),
        (
            draw,
            StageProfile,
            {"placement", "num_microbatches", "seed", "link", "links"}
            | {"num_slices", "attention_share", "slice_cut", "slice_s"},
        ),
        (
            choose_together,
            choose,
            {"loads", "limits", "halves", "gain", "placement", "most", "quick"},
        ),
        (
            NcclTransport,
            GlooTransport,
            {"channels", "streams", "payload_shape", "dtype", "describe"},
        ),
    ],
    ids=lambda subject: getattr(subject, "__qualname__", None),
)
def test_an_entry_point_has_the_parameters_and_defaults_of_its_settings(
    entry: Callable[..., Any], settings: Callable[..., Any], leaves_out: set[str]
) -> None:
    def parameters(subject: Callable[..., Any]) -> dict[str, Any]:
        listed = inspect.signature(subject).parameters.values()
        assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in listed)
        return {p.name: p.default for p in listed if p.name not in leaves_out}

    assert parameters(entry) == parameters(settings)


def test_options_that_are_passed_on_are_those_of_the_entry_point() -> None:
    signature = inspect.signature(Pipeline)
    named = {
        parameter.name: parameter.annotation
        for parameter in signature.parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "initialize"
    }
    # The annotations of this module are strings, so compare them with the text of the options'
    # annotations.
    listed = PipelineOptions.__annotations__
    assert {name: kind.__forward_arg__ for name, kind in listed.items()} == named


@pytest.mark.parametrize(
    ("glosses", "originals"),
    [
        (
            {name: gloss for name, gloss in _glosses(install, "Args").items() if name != "model"},
            _class_glosses(Settings),
        ),
        (_glosses(Pipeline, "Args"), _class_glosses(PipelineSettings)),
        (
            _glosses(Pipeline.loop, "Args"),
            {name: gloss for name, gloss in _glosses(Loop, "Args").items() if name != "pipeline"},
        ),
    ],
    ids=["install", "Pipeline", "Pipeline.loop"],
)
def test_an_entry_point_describes_each_parameter_as_its_settings_do(
    glosses: dict[str, str], originals: dict[str, str]
) -> None:
    assert glosses
    assert glosses == originals


@pytest.mark.parametrize(
    "entry",
    [install, Pipeline, Pipeline.loop, make_policies, simulate, draw, choose_together],
    ids=lambda entry: entry.__qualname__,
)
def test_each_parameter_of_an_entry_point_has_a_type_and_a_description(
    entry: Callable[..., Any],
) -> None:
    parameters = inspect.signature(entry).parameters.copy()
    parameters.pop("self", None)
    assert all(p.annotation is not p.empty for p in parameters.values())
    assert _glosses(entry, "Args").keys() == parameters.keys()


def test_a_profile_file_has_an_argument_for_each_key() -> None:
    keys = forms()["profile"]["properties"].keys() - {"format"}
    assert inspect.signature(profile_file.document).parameters.keys() == keys
