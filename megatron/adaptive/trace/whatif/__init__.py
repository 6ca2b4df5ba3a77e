"""Answers what a run would gain: its steps simulated from their dependencies, with other times.

- ``operations``  what every rank did in some iterations, what it waited for, and its simulation
- ``replay``      recorded times under other schedules, and microbatches dealt over replicas
- ``answers``     slowdowns, shares, causes and repairs
"""
