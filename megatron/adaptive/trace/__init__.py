"""Records the spans of a run, and reads, analyzes and displays the recorded traces.

These modules are used during training, and import neither torch nor a drawing package:

- ``trace_format``  defines the records of a trace (header, iterations, spans, clock samples) and
  their text format
- ``recorder``      collects the spans of a step, and writes them in a background thread
- ``status_files``  writes each rank's current action to a file, and reads the file with the run's
  progress
- ``files``         writes files atomically, and writes optional files so that errors do not stop
  the run
- ``clock``         compares clocks during a job, and converts the times of all ranks to one clock
- ``machine_counters`` counts events that keep a rank from computing, together with
  ``network_counters`` and ``gpu_counters``
- ``hang_watch``    runs as a separate process, and finds the rank that blocks a hanging job

These modules read, convert and display a trace:

- ``block_index``   finds the positions of spans in a file without reading the spans, and parses
  spans
- ``span_columns``  stores the spans of a rank as columns, and matches each send with its receive
- ``read``          reads a folder of per-rank files as a
  :class:`~megatron.adaptive.trace.read.RunTrace`
- ``metrics``       computes statistics of a whole run, using several processes
- ``monitor``       reads the state of a running job, which ``cli.top`` displays
- ``step_view``     represents one iteration of one pipeline as objects, from which the charts are
                    drawn
- ``legacy_text``   writes and reads the older text format
  ``trace_pipeline_<p>_model_chunks_<c>.txt``
- ``locate``        finds the trace of the run that the user names, or of the newest run
- ``views``         displays a trace in Excel, HTML, Perfetto, PNG or TensorBoard files
- ``imports``       reads traces written by other programs
- ``whatif``        simulates steps with changed durations, for example as if a slow rank
  were as fast as the others
- ``flight_recorder`` reads torch's dumps to find the collective that hangs and the ranks that have
  not entered it
- ``diagnose``      finds causes of slow steps, such as a slow rank, link or data reader
"""
