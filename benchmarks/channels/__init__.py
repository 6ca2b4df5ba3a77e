"""Parts of ``benchmarks/transport.py``.

One *pair* per library (torch and ours; MPI over shared memory; MPI over UCX) is two processes, one
to a processor, that stay for the whole run. All pairs take turns within each repetition, so that
whatever else the machine does hits all of them alike::

    transport.py ── transfers.py ── pair.Pair ──unix socket── worker.py (2 processes)
                                                                 patterns.py   what is timed
                                                                 connectors.py gloo, MPI
                                                                 ours.py       our transports
                                                                 copies.c      memcpy, distances
"""
