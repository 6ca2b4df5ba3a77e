"""What happened in a run, and how to look at it.

Writing side (used while training, imports neither torch nor a drawing package):

- ``event``     what a trace is made of: header, iterations, spans, clock samples, their words
- ``lines``     the text form of them
- ``recorder``  collects spans in a step and writes them from a thread

Reading side:

- ``index``     where a file has what, found without reading the spans
- ``parse``     lines of spans as numbers
- ``table``     spans of a rank as columns
- ``clock``     how far two clocks are apart, from exchanges of messages
- ``align``     all ranks of a run on one clock
- ``read``      a folder of per-rank files as one :class:`~megatron.adaptive.trace.read.RunTrace`
- ``messages``  each send with its receive
- ``figures``   figures of a whole run, read by several processes
- ``step``      one iteration of one pipeline as objects: what every chart draws
- ``summary``   figures of a step: busy, wait, bubble, durations
- ``order``     the text form ``trace_pipeline_<p>_model_chunks_<c>.txt``, written and read
- ``chrome``    the events of a run for chrome://tracing and Perfetto
- ``palette``   the colours shared by the charts
- ``workbook``  the chart as ``.xlsx``
- ``picture``   the chart as ``.png``
- ``files``     writes a result whole or not at all
- ``locate``    which run the user means

To test all of it:

- ``synthetic``  made-up runs of any size, with faults that are known
"""
