"""Changes a running job: its schedule, the assignment of stages to ranks, the layers per stage."""
