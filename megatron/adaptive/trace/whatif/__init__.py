"""Answers what a run would gain: its steps simulated from their dependencies, with other times.

- ``operations``  what every rank did in some iterations, as columns
- ``graph``       what each operation waits for, and the simulation of that
- ``replay``      recorded times under other schedules, and microbatches dealt over replicas
- ``answers``     slowdowns, shares, causes and repairs
"""
