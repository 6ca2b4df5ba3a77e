"""Measurements; each file of this folder says how to run it."""
