"""Finds causes of slow steps, such as slow ranks, links or data reads, spikes and uneven stages.

- ``find_causes``  searches for all causes, and computes the cost of each finding by simulation
"""

from megatron.adaptive.trace.diagnose.cause import Cause, Evidence, RecordedSteps, Remedy
from megatron.adaptive.trace.diagnose.find_causes import diagnose
from megatron.adaptive.trace.diagnose.finding import Diagnosis, Finding

__all__ = ["Cause", "Diagnosis", "Evidence", "Finding", "Remedy", "RecordedSteps", "diagnose"]
