"""The trainer's parts: data, loop, checkpoints, logging, profiling."""
