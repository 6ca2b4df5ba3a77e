"""Records the spans of a run, and reads, diagnoses and displays the recorded traces.

Used during training (these modules import neither torch nor a drawing package):

- ``trace_format``  records of a trace (header, iterations, spans, clock samples), their text format
- ``recorder``      collects the spans of a step, and writes them in a background thread
- ``status_files``  file with each rank's current action, and file with the run's progress
- ``files``         atomic writes, and optional files whose loss does not stop a run
- ``clock``         compares clocks during a job, and converts the times of all ranks to one clock
- ``machine_counters`` counts events that kept a rank from computing, with ``network_counters`` and
  ``gpu_counters``
- ``hang_watch``    separate process that finds the rank that blocks a hanging job

Used to read a trace:

- ``block_index``   finds the positions of spans in a file without reading them; parses spans
- ``span_columns``  spans of a rank as columns; matches each send with its receive
- ``read``          folder of per-rank files as a :class:`~megatron.adaptive.trace.read.RunTrace`
- ``metrics``       statistics of a whole run, computed by several processes
- ``monitor``       state of an active run, displayed by ``cli.top``
- ``step_view``     one iteration of one pipeline as objects, for charts
- ``legacy_text``   older text format ``trace_pipeline_<p>_model_chunks_<c>.txt``
- ``locate``        finds the trace of the run that the user chose, or of the newest run
- ``views``         displays a trace as Excel, HTML, Perfetto, PNG or TensorBoard file
- ``imports``       reads traces written by other programs
- ``whatif``        simulates steps with changed times, such as with a slower or a repaired rank
- ``flight_recorder`` reads torch's dumps: which collective hangs, and which ranks did not enter it
- ``diagnose``      finds causes of slow steps, such as a slow rank, link or data reader
"""
