"""Defines, for each program that writes traces, the settings that remove causes of delay."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.trace.trace_format import TraceHeader


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Contains the settings of one program that make a run faster, as texts for the user.

    Attributes:
        slow_rank: Setting that moves work away from a slow rank.
        slow_replica: Setting that gives a slow replica less work; empty if there is no setting.
        layers: Name of the parts of the model that a partition divides.
        partition: Beginning of the setting that selects a partition.
        links: Advice on how to make messages faster.
        one_length: Setting that makes microbatches equally long in a run without replicas.
        lengths: Setting that makes microbatches equally long in a run with replicas.
        adaptive: Setting that selects the rule ``adaptive`` with two chunks per rank.
        at_run_time: Setting that chooses the order of actions at run time.
        more_in_flight: Setting that allows more microbatches in flight.
        readers: Setting that reads data with more processes.
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
        """Returns the setting that selects ``partition``, which has the form ``3-4-5``."""
        return f"{self.partition}{partition}" + ('"' if self.partition.endswith('"') else "")


TRAINER = Advice(
    slow_rank="--repartition auto moves layers off it; ",
    slow_replica="--balance-replicas speed gives its replica less; ",
    layers="layers",
    partition="--partition ",
    links="look at the links named above; use --transport rdma or tcp instead of gloo",
    one_length="--pack-to TOKENS, or sort documents by length",
    lengths="--balance-replicas lengths spreads them; --pack-to TOKENS makes them equal",
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
    one_length="batch samples of one size, or see order and dealing",
    lengths="batch samples of one size, or see order and dealing",
    adaptive='schedule="adaptive", chunks=2',
    at_run_time='schedule="adaptive"',
    more_in_flight="a larger activation_cap",
    readers="num_workers of the data loader",
    no_trace="no trace_dir",
)


def advice_for(header: TraceHeader) -> Advice:
    """Returns the settings for the program that wrote the trace with ``header``."""
    return PIPELINE if header.order else TRAINER
