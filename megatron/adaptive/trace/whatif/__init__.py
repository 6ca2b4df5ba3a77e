"""Estimates how much faster a run would be without some cause of delay, by simulating its steps.

- ``operations``  the operations of each rank, their dependencies, and the simulation
- ``replay``      recorded times under other schedules, and with microbatches dealt over replicas
- ``answers``     slowdowns, shares, causes and repairs
"""
