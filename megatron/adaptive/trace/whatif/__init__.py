"""Estimates what a run would gain from repairs, by simulating its recorded steps with other times.

- ``operations``  the operations of each rank, their dependencies, and the simulation
- ``replay``      recorded times under other schedules, and with microbatches dealt over replicas
- ``answers``     slowdowns, shares, causes and repairs
"""
