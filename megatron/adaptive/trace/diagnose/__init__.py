"""Finds causes of slow steps, such as slow ranks, links or data reads, spikes and uneven stages.

- ``find_causes``  searches for all causes, and computes the cost of each finding by simulation
- ``cause``        interface of a cause, and lookup of causes by name
- ``causes``       causes of this package, one per module, each with a test, texts and remedies
- ``finding``      results of a diagnosis, as text and as JSON
- ``samples``      measured times of a run as arrays, robust statistics, and search for changes
- ``baselines``    compares each rank with its peers, with the plan and with its earlier times
- ``stage_costs``  time of a layer on each stage, and the best partition for these times
"""

from megatron.adaptive.trace.diagnose.cause import Cause, Evidence, RecordedSteps, Remedy
from megatron.adaptive.trace.diagnose.find_causes import diagnose
from megatron.adaptive.trace.diagnose.finding import Diagnosis, Finding

__all__ = ["Cause", "Diagnosis", "Evidence", "Finding", "Remedy", "RecordedSteps", "diagnose"]
