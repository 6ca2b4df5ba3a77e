"""Estimates how much faster a run would be without some cause of delay, by simulating its steps.

- ``operations``  reads each rank's operations, finds their dependencies, and simulates them
- ``replay``      simulates other schedules, and microbatches on other replicas
- ``answers``     computes slowdowns, their causes, and what repairs would save
"""
