"""Names what slows a run: a rank, a link, the reading of data, spikes, uneven stages.

- ``finding``    what a diagnosis says, for people and for programs
- ``measured``   the times of a run that all tests look at, as arrays
- ``robust``     medians, spreads, and when a series of numbers changed
- ``baselines``  how far ranks are from what peers, the plan and their own past say of them
- ``ranks``      ranks whose work takes longer
- ``links``      messages that travel longer than others
- ``reading``    input starvation
- ``spikes``     single actions of a rank that take far longer
- ``partition``  layers per stage that make the best of what was measured
- ``run``        puts these together
"""

from megatron.adaptive.trace.diagnose.finding import CAUSES_FOUND, Diagnosis, Finding
from megatron.adaptive.trace.diagnose.run import diagnose

__all__ = ["CAUSES_FOUND", "Diagnosis", "Finding", "diagnose"]
