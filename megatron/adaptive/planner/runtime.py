"""How the program that runs a plan behaves where the plan does not say.

The planner predicts for this project's own trainer. Runs of other programs, which published
measurements come from, differ in a few ways that are known from their documentation and sources.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEEPSPEED", "OURS", "Runtime"]


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Behaviour of a training program.

    Attributes:
        calls: whether messages between stages are calls of the device's stream, see
            ``rendezvous``; known for 1F1B.
        buffer_bytes: up to this size such a message leaves without its receiver.
        sliced_messages: whether tensor-parallel ranks send a part of a stage's output each, and
            gather it after it arrived.
        reads_slices: whether the CPU looks into a part that arrived before it launches anything:
            then launching is not hidden.
        parameter_copies_bytes: for each parameter that a rank holds, bytes of copies that are made
            while gradients are reduced and while the optimizer runs.
        context_bytes: memory that no tensor accounts for: the context of the device, buffers and
            code of its libraries.
        group_bytes: the same for each group of ranks that a rank communicates in.
    """

    calls: bool = False
    buffer_bytes: float = 4 * 2**20
    sliced_messages: bool = False
    reads_slices: bool = False
    parameter_copies_bytes: float = 0.0
    context_bytes: float = 0.5e9
    group_bytes: float = 0.0


OURS = Runtime()
"""This project's trainer."""

DEEPSPEED = Runtime(calls=True, sliced_messages=True, reads_slices=True)
"""DeepSpeed's pipeline engine up to 2023: the stream waits for sends and receives; with tensor
parallelism the output of a stage is sent in as many parts, beside their sizes, which the receiver
reads (``PartitionedTensor.from_meta``). NCCL's buffers have 4 MiB (``NCCL_BUFFSIZE``)."""
