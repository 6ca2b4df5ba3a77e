"""Records what happens in a run, reads it back, diagnoses and draws it.

Writing side (used while training, imports neither torch nor a drawing package):

- ``event``     what a trace is made of: header, iterations, spans, clock samples; their text form
- ``recorder``  collects spans in a step and writes them from a thread
- ``live_state``  what a rank does at this moment, in a file of its own; how far a run is

Reading side:

- ``index``     where a file has what, found without reading the spans; lines of spans as numbers
- ``table``     spans of a rank as columns, and each send with its receive
- ``clock``     compares the clocks of a running job, and puts all ranks of a run on one
- ``read``      a folder of per-rank files as one :class:`~megatron.adaptive.trace.read.RunTrace`
- ``figures``   figures of a whole run, read by several processes
- ``live``      a run in progress, read as it grows and drawn by ``cli.top``
- ``step``      one iteration of one pipeline as objects, with its bubbles: what every chart draws
- ``order``     the text form ``trace_pipeline_<p>_model_chunks_<c>.txt``, written and read
- ``views``     what a trace looks like: Excel, HTML, Perfetto, PNG, TensorBoard
- ``files``     writes a result whole or not at all
- ``locate``    which run the user means
- ``imports``   traces that other programs wrote
- ``whatif``    steps simulated with other times: slowdowns, shares, repairs
- ``diagnose``  names what slows a run: a rank, a link, the reading of data
"""
