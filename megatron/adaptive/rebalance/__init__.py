"""Changes a running job: its schedule, the placement of stages on ranks, the layers per stage."""
