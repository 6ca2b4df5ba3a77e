"""Measures layers, links and free memory, for the planner and for the choice of schedules."""
