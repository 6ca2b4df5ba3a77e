"""Implements the parts of ``studies.planner``, with one module per part."""
