"""Finds causes of slow steps: a rank, a link, the reading of data, spikes, uneven stages.

- ``finding``      results of a diagnosis, for people and for programs
- ``samples``      measured times of a run as arrays; medians, spreads and changes of them
- ``baselines``    compares each rank with its peers, the plan and its past
- ``stage_costs``  times of layers on each stage, and the partition that fits them
- ``causes``       tests for slow ranks, links, reading, spikes and uneven stages; remedies
"""

from megatron.adaptive.trace.diagnose.causes import diagnose
from megatron.adaptive.trace.diagnose.finding import CAUSES_FOUND, Diagnosis, Finding

__all__ = ["CAUSES_FOUND", "Diagnosis", "Finding", "diagnose"]
