"""Changes the schedule, placement of stages, and number of layers per stage of a running job."""
