"""Finds causes of slow steps: a rank, a link, the reading of data, spikes, uneven stages.

- ``find_causes``  loops over the causes; cost of each finding by simulation
- ``cause``        what a cause is, and how it is found
- ``causes``       the causes of this package, a module each: test, text, remedies
- ``finding``      results of a diagnosis, as text and as JSON
- ``samples``      measured times of a run as arrays; robust statistics; search for changes
- ``baselines``    compares each rank with its peers, the plan and its own past
- ``stage_costs``  time of a layer on each stage, and the partition that suits these times
"""

from megatron.adaptive.trace.diagnose.cause import Cause, Evidence, RecordedSteps, Remedy
from megatron.adaptive.trace.diagnose.find_causes import diagnose
from megatron.adaptive.trace.diagnose.finding import Diagnosis, Finding

__all__ = ["Cause", "Diagnosis", "Evidence", "Finding", "Remedy", "RecordedSteps", "diagnose"]
