"""Names what slows a run: a rank, a link, the reading of data, spikes, uneven stages.

- ``finding``    what a diagnosis says, for people and for programs
- ``measured``   the times of a run that all tests look at, as arrays; medians, spreads, changes
- ``baselines``  how far ranks are from what peers, the plan and their own past say of them
- ``causes``     the tests: slow ranks, links, reading, spikes, uneven stages; what to do about it
"""

from megatron.adaptive.trace.diagnose.causes import diagnose
from megatron.adaptive.trace.diagnose.finding import CAUSES_FOUND, Diagnosis, Finding

__all__ = ["CAUSES_FOUND", "Diagnosis", "Finding", "diagnose"]
