"""Estimates by simulation how much faster a run's steps would be without a certain delay.

- ``operations``  reads each rank's operations, finds their dependencies, and simulates them
- ``replay``      simulates other schedules, and microbatches on other replicas
- ``answers``     computes slowdowns, their causes, and the time that each change would save
"""
