"""Simulates a run to estimate how much faster its steps would be without certain delays.

- ``operations``  reads each rank's operations, finds their dependencies, and simulates them
- ``replay``      simulates other schedules, and microbatches on other replicas
- ``answers``     computes slowdowns, their causes, and the time that each change would save
"""
