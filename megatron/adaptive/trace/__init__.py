"""What happened in a run, and how to look at it.

Writing side (used while training, imports neither torch nor a drawing package):

- ``event``     the two kinds of line in a trace file, and their text form
- ``recorder``  collects spans in a step and writes them from a thread

Reading side:

- ``read``      a folder of per-rank files as one :class:`~megatron.adaptive.trace.read.RunTrace`
- ``step``      one iteration of one pipeline, on one clock: what every view draws
- ``summary``   figures of a step: busy, wait, bubble, durations
- ``order``     the text form ``trace_pipeline_<p>_model_chunks_<c>.txt``, written and read
- ``chrome``    the events of a run for chrome://tracing and Perfetto
- ``palette``   the colours shared by the charts
- ``workbook``  the chart as ``.xlsx``
- ``picture``   the chart as ``.png``
- ``files``     writes a result whole or not at all
- ``locate``    which run the user means
"""
