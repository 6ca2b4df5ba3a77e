"""Defines which settings to recommend, depending on the program that wrote the trace."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.trace.trace_format import TraceHeader


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Contains the names of settings that make a run faster, as texts for the user.

    Attributes:
        slow_rank: Setting that moves work away from a slow rank.
        slow_replica: Setting that gives a slow replica less work; empty if there is no setting.
        layers: Name for the parts of the model that a partition divides among the stages.
        partition: First part of the setting that selects a partition.
        links: Advice for making messages faster.
        one_length: Setting that gives all microbatches the same length in a run without replicas.
        lengths: Setting that gives all microbatches the same length in a run with replicas.
        adaptive: Setting that selects the rule ``adaptive`` with two chunks per rank.
        at_run_time: Setting that makes the run choose the order of actions at run time.
        more_in_flight: Setting that allows more microbatches in flight.
        readers: Setting for the number of processes that read data.
        no_trace: Setting that turns tracing off.
    """

    slow_rank: str
    slow_replica: str
    layers: str
    partition: str
    links: str
    one_length: str
    lengths: str
    adaptive: str
    at_run_time: str
    more_in_flight: str
    readers: str
    no_trace: str

    def of_partition(self, partition: str) -> str:
        """Returns the setting that selects ``partition``, such as ``3-4-5``."""
        return f"{self.partition}{partition}" + ('"' if self.partition.endswith('"') else "")


TRAINER = Advice(
    slow_rank="--repartition auto moves layers off it; ",
    slow_replica="--balance-replicas speed gives its replica less work; ",
    layers="layers",
    partition="--partition ",
    links="look at the links named above; use --transport rdma or tcp instead of gloo",
    one_length="--pack-to TOKENS, or sort documents by length",
    lengths="--balance-replicas lengths spreads long ones evenly; --pack-to TOKENS makes all equal",
    adaptive="--pipeline-schedule adaptive with two chunks per rank",
    at_run_time="--pipeline-schedule adaptive",
    more_in_flight="a larger --activation-cap",
    readers="--num-workers",
    no_trace="no --trace-dir",
)
PIPELINE = Advice(
    slow_rank='repartition="auto" moves segments off it; ',
    slow_replica="",
    layers="segments",
    partition='partition="',
    links="look at the links named above; transport=TransportConfig(transport=...) chooses another",
    one_length="batch samples of equal size, or use the settings order and dealing",
    lengths="batch samples of equal size, or use the settings order and dealing",
    adaptive='schedule="adaptive", chunks=2',
    at_run_time='schedule="adaptive"',
    more_in_flight="a larger activation_cap",
    readers="num_workers of the data loader",
    no_trace="no trace_dir",
)


def advice_for(header: TraceHeader) -> Advice:
    """Returns the advice for users of the program that wrote the trace with ``header``."""
    return PIPELINE if header.order else TRAINER
