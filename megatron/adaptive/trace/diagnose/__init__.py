"""Finds the causes of slow steps, for example slow ranks, links or data reads, or uneven stages.

- ``find_causes``  searches for all causes, and computes the cost of each finding by simulation
- ``cause``        defines the interface of a cause, and finds causes by name
- ``causes``       contains the causes of this package, one per module, with texts and remedies
- ``finding``      holds the results of a diagnosis, as text and as JSON
- ``samples``      holds the measured times of a run as arrays, and computes statistics of the times
                   that are robust to outliers
- ``baselines``    compares each rank with its peers, with the plan and with its earlier times
- ``stage_costs``  estimates the time of a layer on each stage, and finds the best partition
"""

from megatron.adaptive.trace.diagnose.cause import Cause, Evidence, RecordedSteps, Remedy
from megatron.adaptive.trace.diagnose.find_causes import diagnose
from megatron.adaptive.trace.diagnose.finding import Diagnosis, Finding

__all__ = ["Cause", "Diagnosis", "Evidence", "Finding", "Remedy", "RecordedSteps", "diagnose"]
