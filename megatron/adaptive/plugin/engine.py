"""The executor behind Megatron-LM's steps: built at the first one, by all ranks together.

Owns the channels, the trace and their end. What a step does is
:class:`~megatron.adaptive.engine.forward_backward.ForwardBackward`.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron.adaptive.accelerator import Accelerator, current_device
from megatron.adaptive.config.parallel import TransportConfig
from megatron.adaptive.config.schedule import KEEPING_ALL
from megatron.adaptive.engine.build import (
    Wiring,
    build_executor,
    gather_places,
    inputs_in_flight,
)
from megatron.adaptive.engine.deferred_layers import attach_stores
from megatron.adaptive.engine.forward_backward import ForwardBackward
from megatron.adaptive.errors import ConfigError, TraceError, TransportError
from megatron.adaptive.plugin.refused import check_call, check_model
from megatron.adaptive.plugin.settings import Settings
from megatron.adaptive.plugin.trace import StepTrace, open_trace
from megatron.adaptive.schedule.placement import Placement

__all__ = ["Engine"]


class Engine:
    """Runs the steps of this rank.

    Args:
        settings: the plugin's, in force for all steps.

    Attributes:
        left_open: it was closed after a failed step: threads still wait for messages.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._accelerator = _this_device()
        self._chunks: list[torch.nn.Module] = []
        self._forward_backward: ForwardBackward | None = None
        self._group: dist.ProcessGroup | None = None
        self._placement: Placement | None = None
        self._payload: tuple[int, ...] | None = None
        self._wiring: Wiring | None = None
        self._trace: StepTrace | None = None
        self._broken = False
        self.left_open = False

    def run(self, given: Mapping[str, Any]) -> list[Any]:
        """Run a step. The first one is collective over all ranks of the job.

        Args:
            given: the arguments of megatron-core's function.

        Returns:
            What megatron-core's function returns.

        Raises:
            ConfigError: the model or an argument asks for what the engine does not do.
            TransportError: another rank is gone or silent.
        """
        check_call(given)
        model = given["model"]
        chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
        config = get_model_config(chunks[0])
        self._take_model(config, chunks)
        self._connect(config, given)
        assert self._forward_backward is not None
        self._end_iteration()
        if self._trace is not None and not given.get("forward_only", False):
            self._trace.begin(given["num_microbatches"])
            given = {**given, "data_iterator": self._trace.timed(given["data_iterator"])}
        try:
            return self._forward_backward(**given)
        except BaseException:
            self._broken = True  # peers are not where a farewell would find them
            raise

    def close(self) -> None:
        """End the trace and the channels; all ranks must do so. After a failed step only the trace.

        Raises:
            TransportError: another rank did not close its channels in time.
        """
        atexit.unregister(self._close_at_exit)
        self._end_iteration()
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        wiring, self._wiring = self._wiring, None
        if wiring is not None and self._broken:
            self.left_open = True
        elif wiring is not None:
            wiring.close()

    def _close_at_exit(self) -> None:
        # After an error that nobody caught the others wait elsewhere, so no farewell.
        self._broken = self._broken or getattr(sys, "last_value", None) is not None
        try:
            self.close()
        except (TransportError, TraceError) as error:
            print(f"megatron.adaptive at exit: {error}", file=sys.stderr, flush=True)

    def _take_model(self, config: Any, chunks: list[torch.nn.Module]) -> None:
        """Hold a model that is new here against the rules, and prepare its steps anew."""
        known = len(chunks) == len(self._chunks) and all(
            new is old for new, old in zip(chunks, self._chunks, strict=True)
        )
        if known:
            return
        replicas = parallel_state.get_data_parallel_world_size()
        check_model(config, chunks, self._settings, replicas=replicas)
        self._chunks = chunks
        self._forward_backward = None

    def _connect(self, config: Any, given: Mapping[str, Any]) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        placement = Placement(num_ranks=group.size(), num_chunks=len(self._chunks))
        payload = _payload_shape(config, given, len(self._chunks))
        if self._wiring is None:
            self._group, self._placement, self._payload = group, placement, payload
            settings = self._settings
            if settings.trace_dir is not None:
                self._trace = open_trace(
                    settings.trace_dir,
                    settings.schedule,
                    placement,
                    given["num_microbatches"],
                    self._accelerator,
                )
            self._build(config, given["num_microbatches"])
            atexit.register(self._close_at_exit)
        elif group is not self._group or placement != self._placement:
            raise ConfigError(
                f"the pipeline of {placement.num_ranks} ranks with {placement.num_chunks} chunks "
                "each is not the one of the first step, which the engine is connected for: call "
                "megatron.adaptive.uninstall() and install() on all ranks in between"
            )
        elif self._payload is not None and payload != self._payload:
            self._payload = None  # not all alike, as it seemed
            self._build(config, given["num_microbatches"])
        if self._forward_backward is None:
            self._forward_backward = self._make_forward_backward(config, placement)

    def _build(self, config: Any, num_microbatches: int) -> None:
        """Connect this rank with the others; collective over all ranks of the job."""
        assert self._placement is not None
        dtype = config.pipeline_dtype
        former = self._wiring
        self._wiring = build_executor(
            placement=self._placement,
            accelerator=self._accelerator,
            places=gather_places(),
            payload_shape=self._payload,
            payload_dtype=torch.float32 if dtype is None else dtype,
            timeout_s=self._settings.timeout_s,
            recorder=None if self._trace is None else self._trace.recorder,
            transport=TransportConfig(transport=self._settings.transport),
            in_flight=inputs_in_flight(
                self._placement,
                num_microbatches,
                cap=self._settings.activation_cap,
                keeps_all=self._settings.schedule in KEEPING_ALL,
            ),
        )
        if self._trace is not None:
            self._trace.watch(self._wiring.executor)
        self._forward_backward = None
        if former is not None:
            former.close()  # by now all ranks are here, with nothing under way
        elif dist.get_rank() == 0:
            print(
                f"megatron.adaptive: schedule {self._settings.schedule} on "
                f"{self._placement.num_ranks} pipeline ranks with {self._placement.num_chunks} "
                f"model chunk{'s' * (self._placement.num_chunks > 1)} each",
                flush=True,
            )

    def _make_forward_backward(self, config: Any, placement: Placement) -> ForwardBackward:
        assert self._wiring is not None
        settings, pieces, stores = self._settings, 0, None
        if settings.split_backward:
            # A fixed order does each weight gradient in one go; a rule cuts it to fill waits.
            pieces = settings.weight_pieces if settings.is_rule else 1
            stores = attach_stores(self._chunks)
        return ForwardBackward(
            executor=self._wiring.executor,
            placement=placement,
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            schedule=settings.schedule,
            activation_cap=settings.activation_cap,
            group_size=getattr(config, "microbatch_group_size_per_vp_stage", None),
            weight_pieces=pieces,
            stores=stores,
            span=None if self._trace is None else self._trace.span,
        )

    def _end_iteration(self) -> None:
        """Write what the step before did, by now done on the device as well."""
        if self._trace is None or self._wiring is None or self._broken:
            return
        self._accelerator.synchronize()
        self._wiring.executor.finish_step()
        self._trace.end()


def _this_device() -> Accelerator:
    """Return the device that Megatron-LM has chosen for this process."""
    device = current_device()
    if device.type != "cuda":
        return Accelerator(device=device, backend="gloo", name="CPU")
    backend = "nccl" if "nccl" in dist.get_backend_config() else "gloo"
    return Accelerator(device=device, backend=backend, name=torch.cuda.get_device_name(device))


def _payload_shape(
    config: Any, given: Mapping[str, Any], num_chunks: int
) -> tuple[int, ...] | None:
    """Return ``[s, b, h]`` of the tensors between stages, ``None`` where they may differ."""
    differs = ("variable_seq_lengths", "mtp_num_layers", "fp32_residual_connection")
    if config.pipeline_dtype is None or any(getattr(config, name, None) for name in differs):
        return None
    length: int = given["seq_length"]
    if num_chunks == 1 and given.get("decoder_seq_length") is not None:
        length = given["decoder_seq_length"]
    length //= parallel_state.get_context_parallel_world_size()
    if config.sequence_parallel:
        length //= parallel_state.get_tensor_model_parallel_world_size()
    return (length, given["micro_batch_size"], config.hidden_size)
