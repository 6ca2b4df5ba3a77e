"""Finds causes of slow steps: a rank, a link, the reading of data, spikes, uneven stages.

- ``finding``      results of a diagnosis, as text and as JSON
- ``samples``      measured times of a run as arrays; robust statistics; search for changes
- ``baselines``    compares each rank with its peers, the plan and its own past
- ``stage_costs``  time of a layer on each stage, and the partition that suits these times
- ``causes``       tests for slow ranks, links, reading, spikes and uneven stages; remedies
"""

from megatron.adaptive.trace.diagnose.causes import diagnose
from megatron.adaptive.trace.diagnose.finding import CAUSES_FOUND, Diagnosis, Finding

__all__ = ["CAUSES_FOUND", "Diagnosis", "Finding", "diagnose"]
