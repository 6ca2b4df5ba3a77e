"""Records the spans of a run, and reads, diagnoses and displays the recorded traces.

Used during training (these modules import neither torch nor a drawing package):

- ``trace_format``  records of a trace (header, iterations, spans, clock samples), their text format
- ``trace_format``  defines the records of a trace (header, iterations, spans, clock samples) and
their text format
- ``status_files``  file with each rank's current action, and file with the run's progress
- ``status_files``  writes a file with each rank's current action, and a file with the run's
progress
- ``files``         writes files atomically, and writes optional files without stopping the run if
that fails
- ``machine_counters`` counts events that kept a rank from computing, with ``network_counters`` and
  ``gpu_counters``
- ``hang_watch``    separate process that finds the rank that blocks a hanging job
- ``hang_watch``    runs a separate process that finds the rank that blocks a hanging job

- ``block_index``   finds the positions of spans in a file without reading them; parses spans
- ``span_columns``  spans of a rank as columns; matches each send with its receive
- ``span_columns``  stores the spans of a rank as columns, and matches each send with its receive
- ``read``          reads a folder of per-rank files as a
:class:`~megatron.adaptive.trace.read.RunTrace`
- ``metrics``       computes statistics of a whole run with several processes
- ``monitor``       reads the state of an active run, which ``cli.top`` displays
- ``step_view``     represents one iteration of one pipeline as objects, for charts
- ``legacy_text``   writes and reads the older text format
``trace_pipeline_<p>_model_chunks_<c>.txt``
- ``views``         displays a trace as Excel, HTML, Perfetto, PNG or TensorBoard file
- ``imports``       reads traces written by other programs
- ``whatif``        simulates steps with changed times, such as with a slower or a repaired rank
- ``whatif``        simulates steps with changed times, for example with a rank that is slower or
has been fixed
- ``flight_recorder`` reads torch's dumps to find which collective hangs, and which ranks did not
enter it
"""
