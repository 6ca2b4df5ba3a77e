"""Declares the forms of the planner's input files, as JSON schemas (2020-12).

``plan --schema NAME`` prints them, for editors and other programs; ``files.check_form`` reads files
by them. A quantity, text with its unit, has ``x-unit``; ``x-zero`` allows 0. ``x-rule`` says a
pattern in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FORMS"]

Schema = dict[str, Any]


def _value(kind: str, about: str, **rules: Any) -> Schema:
    return {"type": kind, "description": about, **rules}


def _text(about: str, **rules: Any) -> Schema:
    return _value("string", about, **rules)


def _quantity(unit: str, about: str, **rules: Any) -> Schema:
    return _text(about, **{"x-unit": unit}, **rules)


def _flag(about: str) -> Schema:
    return _value("boolean", about)


def _count(about: str, least: int = 1) -> Schema:
    return _value("integer", about, minimum=least)


def _number(about: str, **rules: Any) -> Schema:
    return _value("number", about, **({"minimum": 0} | rules))


def _choice(values: tuple[str, ...], about: str) -> Schema:
    return {"enum": list(values), "description": about}


def _list(items: Schema, about: str, least: int = 1) -> Schema:
    return _value("array", about, items=items, minItems=least)


def _pair(one: Schema, other: Schema, about: str = "two entries") -> Schema:
    return _value("array", about, prefixItems=[one, other], minItems=2, maxItems=2)


def _by_name(values: Schema, about: str) -> Schema:
    return _value("object", about, additionalProperties=values)


def _keys(
    needed: Mapping[str, Schema], other: Mapping[str, Schema], about: str, **rules: Any
) -> Schema:
    """Describes an object with keys that must be there and others that may."""
    return _value(
        "object",
        about,
        additionalProperties=False,
        required=list(needed),
        properties={**needed, **other},
        **rules,
    )


def _file(name: str, needed: Mapping[str, Schema], other: Mapping[str, Schema]) -> Schema:
    version = {"const": 1, "description": "version of this form, 1"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{name} file of megatron.adaptive",
        **_keys({"format": version, **needed}, other, f"a {name.lower()} file"),
    }


_BANDWIDTH = {
    "bandwidth": _quantity(
        "bytes_per_s", "bandwidth in one direction with its unit, as in 25 GB/s or 200 Gbit/s"
    )
}
_LINK_OPTIONS = {
    "latency": _quantity(
        "s", "time of an empty message with its unit, as in 5 us", **{"x-zero": True}
    ),
    "shared": _flag("whether messages that go at the same time divide the bandwidth"),
    "sizes": _list(
        _pair(_quantity("bytes", "message size"), _quantity("bytes_per_s", "bandwidth")),
        "measured bandwidth by message size, as in [[64 KiB, 2 GB/s], [4 MiB, 11 GB/s]]",
    ),
}
_LINK_KEYS = {
    **_LINK_OPTIONS,
    "by_pairs": _list(
        _keys(
            {"pairs": _count("how many pairs"), **_BANDWIDTH},
            _LINK_OPTIONS,
            "a link with several pairs",
        ),
        "measured with several pairs of GPUs sending at the same time",
    ),
}


def _link(about: str) -> Schema:
    return _keys(_BANDWIDTH, _LINK_KEYS, about)


_NODES = _keys(
    {
        "gpu": _text("GPU, as in the table of GPUs or in the profile"),
        "count": _count("how many nodes"),
        "gpus_per_node": _count("GPUs of each node"),
        "link": _link(
            "link between two GPUs of a node, as in {bandwidth: 300 GB/s, latency: 3 us}"
        ),
    },
    {
        "type": _text(
            "name of the node type; that of its GPU if left out",
            pattern="^[A-Za-z][A-Za-z0-9._-]*$",
            **{"x-rule": "a name that begins with a letter"},
        ),
        "memory": _quantity(
            "bytes",
            "usable memory of each GPU with its unit, as in 40 GB; from the table of GPUs if left"
            " out",
        ),
        "network": _link("a node's way to other nodes"),
        "price_per_hour": _number("price of a whole node for an hour"),
        "zone": _text("where the nodes are"),
        "cores": _count(
            "processors of a node; read and not used: ranks that share them are planned as if they"
            " did not"
        ),
        "hosts": _list(_text("name of a node"), "names of the nodes"),
    },
    "equal nodes",
)
_CLUSTER = _file(
    "Cluster",
    {"nodes": _list(_NODES, "groups of equal nodes")},
    {
        "name": _text("for people"),
        "network": _link(
            "link between nodes of which nothing else is said, as in"
            " {bandwidth: 100 Gbit/s, latency: 15 us}"
        ),
        "links": _list(
            _keys(
                {
                    "between": _pair(_text("name"), _text("name"), "names of both node types"),
                    **_BANDWIDTH,
                },
                _LINK_KEYS,
                "a link of two types",
            ),
            "links between two node types that differ",
            least=0,
        ),
        "between_zones": _link("link between nodes of different zones"),
    },
)

_PRECISION = _choice(("fp32", "fp16", "bf16"), "type of parameters and activations")
_SHAPE = _keys(
    {
        "layers": _count("layers of the decoder, or of the encoder of bert and t5"),
        "hidden": _count("width between layers"),
        "heads": _count("attention heads"),
        "sequence": _count("tokens of a sample"),
        "vocabulary": _count("rows of the embedding"),
    },
    {
        "family": _choice(("gpt", "bert", "t5"), "decoder only, encoder only, or both"),
        "decoder_layers": _count("layers of T5's decoder"),
        "decoder_sequence": _count("tokens of a sample in T5's decoder"),
        "head_width": _count("width of a head; hidden / heads if left out"),
        "query_groups": _count("key and value heads; heads if left out"),
        "ffn": _count("inner width of the feed-forward block; 4 x hidden if left out"),
        "positions": _count("rows of the position table; the sequence's tokens if left out", 0),
        "gated": _flag("gated feed-forward block"),
        "biases": _flag("linear layers have biases"),
        "norm_biases": _flag("LayerNorm, not RMSNorm"),
        "tied": _flag("embedding and head share weights"),
        "dropout": _flag("dropout keeps masks"),
        "fused_attention": _flag("attention keeps no scores"),
    },
    "a transformer's shape",
)
_LAYER = _keys(
    {"kind": _text("name of the kind, as in the profile")},
    {
        "count": _count("how many of them follow each other"),
        "parameters": _number("numbers that tensor parallelism divides"),
        "replicated_parameters": _number("numbers that every tensor-parallel rank holds"),
        "output_elements": _number("elements that one sample hands to the next layer"),
        "forward_flops": _number("operations of one sample's forward"),
        "attention_flops": _number("those of them that selective recompute repeats"),
        "activation_bytes": _number(
            "kept for the backward of one sample, divided by tensor parallelism"
        ),
        "replicated_activation_bytes": _number("kept by every tensor-parallel rank"),
        "attention_bytes": _number(
            "part of activation_bytes that selective recompute does not keep"
        ),
        "input_bytes": _number("all that full recompute keeps"),
        "workspace_bytes": _number("held only while the layer runs"),
        "tp_bytes": _number("all-reduced over tensor-parallel ranks in a forward"),
        "group": _text("encoder or decoder, where no stage holds both"),
        "counted": _flag("whether --num-layers counts it"),
    },
    "a layer",
)
_LISTED = {
    "precision": _PRECISION,
    "tokens_per_sample": _count("for tokens per second, with layers"),
    "tied_parameters": _number("weights that several layers share, with layers"),
    "tied_layers": _list(_count("layer", 0), "numbers of the layers that share them", least=0),
}
_MODEL = {
    **_file(
        "Model",
        {},
        {
            "name": _text("for people, and for matching profiles"),
            "preset": _text("name of a model"),
            "arguments": _text("arguments of pretrain_gpt.py, or a file of them"),
            "shape": _SHAPE,
            "layers": _list(_LAYER, "layers in pipeline order"),
            **_LISTED,
        },
    ),
    "oneOf": [{"required": [key]} for key in ("preset", "arguments", "shape", "layers")],
}

_SECONDS = {"type": "number", "minimum": 0}
_POSITIVE = {"type": "number", "exclusiveMinimum": 0}
_CURVE = {
    "latency_s": _number("seconds of an empty message"),
    "sizes": _list(_pair(_POSITIVE, _POSITIVE), "message bytes and bytes per second"),
}
_PROFILE = _file(
    "Profile",
    {
        "model": _keys(
            {"name": _text("of the model")},
            {
                "arguments": _list(_text("argument"), "the trainer's arguments of it", least=0),
                "layers": _list(_LAYER, "layers in pipeline order, as in a model file", least=0),
                **_LISTED,
            },
            "what was measured",
        ),
        "layers": _list(
            _keys(
                {
                    "kind": _text("kind of layer"),
                    "gpu": _text("what it ran on"),
                    "tp": _count("tensor-parallel ranks"),
                    "micro_batch": _count("samples of a microbatch"),
                    "forward_s": _number("seconds of a forward"),
                    "backward_input_s": _number(
                        "seconds of a backward by inputs, or of a whole one"
                    ),
                },
                {
                    "backward_weight_s": _number("seconds of the weight gradients"),
                    "tp_included": _flag(
                        "whether the seconds hold the communication of tensor parallelism"
                    ),
                    "kept_bytes": _number("kept from forward to backward"),
                    "parameters": _number("numbers that a rank holds"),
                    "source": _choice(("measured", "estimated"), "where the numbers come from"),
                },
                "a layer",
            ),
            "seconds and bytes of one layer",
        ),
    },
    {
        "made": _text("when"),
        "nodes": _by_name(
            _keys(
                {},
                {
                    "gpu": _text("name of its GPU"),
                    "device": _text("its GPU as the driver names it"),
                    "processes": _count("processes of a node"),
                    "cores": _count("its processors", 0),
                    "memory_bytes": {**_POSITIVE, "description": "of each GPU"},
                },
                "a node",
            ),
            "nodes that took part, by type",
        ),
        "links": _list(
            _keys(
                {
                    "nodes": _pair(_text("type"), _text("type"), "node types at both ends"),
                    "within": _flag("both ends are on one node"),
                    **_CURVE,
                },
                {"pairs": _count("pairs that sent at the same time")},
                "a link",
            ),
            "links between GPUs",
            least=0,
        ),
        "all_reduce": _list(
            _keys(
                {"node": _text("node type"), "ranks": _count("of the group"), **_CURVE},
                {},
                "an all-reduce",
            ),
            "all-reduces within a node",
            least=0,
        ),
        "optimizer_s_per_parameter": _by_name(_SECONDS, "seconds by GPU"),
        "launch_s": _by_name(_SECONDS, "seconds of an action beyond its layers, by GPU"),
        "action_sigma": _number("spread of the logarithm of durations"),
    },
)

FORMS: Mapping[str, Schema] = {"cluster": _CLUSTER, "model": _MODEL, "profile": _PROFILE}
"""Schemas by the name of what a file describes."""
