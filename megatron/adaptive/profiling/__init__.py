"""Measures times of layers and links, and free memory, for planning and choosing schedules."""
