"""Changes the schedule, the placement of stages and the layers per stage of a running job."""
