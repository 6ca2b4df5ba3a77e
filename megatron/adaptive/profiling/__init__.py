"""Measures what the planner and the run-time schedules need: layers, links, nodes, free memory."""
