"""Runs pipeline schedules in real processes that sleep instead of computing.

All competitors run the same stages with the same drawn durations, so two rows of the table differ
only in the order of actions and in the runtime.
"""
