"""Measures layers, links, nodes and free memory, for the planner and the run-time schedules."""
