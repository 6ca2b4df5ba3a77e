"""Changes a job while it runs: its schedule, its placement, and the layers of each stage."""
