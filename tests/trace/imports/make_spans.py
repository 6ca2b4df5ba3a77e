# ruff: noqa: E402
"""Creates the spans in this folder by running megatron-core's 1F1B over gloo with OpenTelemetry.

    torchrun --nproc-per-node 2 tests/trace/imports/make_spans.py FOLDER

The names, attributes and nesting of spans follow Megatron-LM's documentation of its telemetry.
There are spans for steps, microbatches, gradients, the optimizer, and the four kinds of messages
(but not for combined sends and receives). An evaluation runs between two steps.

``FOLDER/console`` contains the log of a console exporter for each rank. ``FOLDER/otlp/spans.jsonl``
contains the spans of both ranks, in the OTLP format that a collector's file exporter writes. The
program requires opentelemetry-sdk and opentelemetry-exporter-otlp-proto-common.
"""

import base64
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.adaptive import accelerator

accelerator.install()  # This call must precede the import of megatron-core.

import torch
import torch.distributed as dist
from google.protobuf.json_format import MessageToDict
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

MICROBATCHES, STEPS, WIDTH, STAGES = 4, 3, 16, 2


class Chunk(torch.nn.Module):
    """Linear layer with the interface of a megatron-core model chunk."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layer, self.config, self.received = torch.nn.Linear(WIDTH, WIDTH), config, None

    def set_input_tensor(self, tensors: list[Any]) -> None:
        self.received = tensors[0]

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        return self.layer(x if self.received is None else self.received)


def forward(inputs: Any, chunk: Chunk) -> tuple[torch.Tensor, Any]:
    """Runs the forward pass of ``chunk``, and returns its output and a function for the loss."""
    y = chunk(next(inputs))
    return y, lambda out: (out.sum(), torch.ones((), dtype=torch.int), {})


def spanned(tracer: Any, name: str, function: Callable[..., Any], key: str = "") -> Any:
    """Returns ``function``, wrapped in a span with the name ``megatron.<name>``.

    If ``key`` is given, the value of the argument ``key`` is recorded as the index of the
    microbatch.
    """

    def run(*arguments: Any, **more: Any) -> Any:
        with tracer.start_as_current_span(f"megatron.{name}") as span:
            if key:
                span.set_attribute("megatron.microbatch_id", int(more[key]))
            return function(*arguments, **more)

    return run


def main(folder: Path) -> None:
    """Trains for a few steps, and writes the spans of these steps to ``folder``."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / "console").mkdir(parents=True, exist_ok=True)
    (folder / "otlp").mkdir(parents=True, exist_ok=True)
    attributes = {"service.name": "megatron-lm", "service.instance.id": f"job-7-rank{rank}"}
    attributes |= {"nemo.run.id": "job-7", "nv.dl.rank": rank, "nv.dl.world_size": STAGES}
    attributes |= {"dl.pipeline_parallel.size": STAGES, "dl.tensor_parallel.size": 1}
    provider, kept = TracerProvider(resource=Resource(attributes)), InMemorySpanExporter()
    log = (folder / "console" / f"rank{rank}.log").open("w")
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=log)))
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("nemo.lens")
    step, back = schedules.forward_step, schedules.backward_step
    schedules.forward_step = spanned(tracer, "microbatch.forward", step, "current_microbatch")
    schedules.backward_step = spanned(tracer, "microbatch.backward", back)
    for name in ("recv_forward", "send_forward", "recv_backward", "send_backward"):
        method = getattr(P2PCommunicator, name)
        setattr(P2PCommunicator, name, spanned(tracer, f"p2p.{name}", method))
    config = TransformerConfig(
        num_layers=STAGES,
        hidden_size=WIDTH,
        num_attention_heads=1,
        pipeline_model_parallel_size=STAGES,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=True,
        deallocate_pipeline_outputs=False,
        calculate_per_token_loss=True,
    )
    groups: Any = ProcessGroupCollection()
    groups.pp = dist.new_group([0, 1])
    alone = [dist.new_group([member]) for member in range(STAGES)][rank]
    groups.tp = groups.cp = groups.dp_cp = alone
    groups.embd = groups.pos_embd = None
    chunk, steps = Chunk(config), schedules.forward_backward_pipelining_without_interleaving
    optimizer = torch.optim.SGD(chunk.parameters(), lr=0.01)

    def run(**more: Any) -> None:
        steps(
            forward_step_func=forward,
            data_iterator=[iter(torch.randn(MICROBATCHES, 1, 1, WIDTH))],
            model=[chunk],
            num_microbatches=MICROBATCHES,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=P2PCommunicator(groups.pp, config),
            pg_collection=groups,
            **more,
        )

    for iteration in range(1, STEPS + 1):
        with tracer.start_as_current_span("megatron.train_step") as span:
            span.set_attribute("megatron.iteration", iteration)
            with tracer.start_as_current_span("megatron.forward_backward"):
                run()
            with tracer.start_as_current_span("megatron.grad_sync.finish"):
                dist.barrier()
            with tracer.start_as_current_span("megatron.optimizer_step"):
                optimizer.step()
                optimizer.zero_grad()
        print(f" iteration {iteration}/ {STEPS} | lm loss: 1.0 |", file=log)
        if iteration == 2:
            with tracer.start_as_current_span("megatron.evaluate"), torch.no_grad():
                run(forward_only=True)
    log.close()
    batches = [None] * STAGES
    encoded = MessageToDict(encode_spans(kept.get_finished_spans()))
    # Span IDs are hexadecimal numbers in the JSON format of OTLP.
    for group in encoded["resourceSpans"]:
        for span in (s for scope in group["scopeSpans"] for s in scope["spans"]):
            for key in ("traceId", "spanId", "parentSpanId"):
                if key in span:
                    span[key] = base64.b64decode(span[key]).hex()
    dist.all_gather_object(batches, encoded)
    if rank == 0:
        lines = [json.dumps(batch, separators=(",", ":")) + "\n" for batch in batches]
        (folder / "otlp" / "spans.jsonl").write_text("".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
