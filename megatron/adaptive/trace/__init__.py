"""Records the spans of a run, reads them, diagnoses and draws them.

Used while training (imports neither torch nor a drawing package):

- ``trace_format``  records of a trace (header, iterations, spans, clock samples), their text form
- ``recorder``      collects the spans of a step and writes them from a thread
- ``status_files``  file with each rank's current action, and file with the run's progress
- ``files``         atomic writes; optional files, whose loss does not stop a run
- ``clock``         compares the clocks of a running job; puts all ranks of a run on one clock
- ``machine_counters`` counts what kept a rank from computing, with ``network_counters`` and
  ``gpu_counters``
- ``hang_watch``    separate process that finds the rank that a hanging job waits for

Used to read a trace:

- ``block_index``   positions of spans in a file, found without reading them; parses lines of spans
- ``span_columns``  spans of a rank as columns; matches each send with its receive
- ``read``          folder of per-rank files as one :class:`~megatron.adaptive.trace.read.RunTrace`
- ``metrics``       statistics of a whole run, computed by several processes
- ``monitor``       state of a run in progress, displayed by ``cli.top``
- ``step_view``     one iteration of one pipeline as objects, for charts
- ``legacy_text``   older text format ``trace_pipeline_<p>_model_chunks_<c>.txt``
- ``locate``        finds the trace of the run that the user names, or of the latest run
- ``views``         drawings of a trace: Excel, HTML, Perfetto, PNG, TensorBoard
- ``imports``       traces that other programs wrote
- ``whatif``        simulates steps with other times: what if a rank were slower, faster or repaired
- ``flight_recorder`` dumps of torch: which collective does not end, who has not entered it
- ``diagnose``      finds causes of slow steps: a rank, a link, the reading of data
"""
