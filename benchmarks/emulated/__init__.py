"""Runs pipeline schedules with emulated compute: real processes and messages, sleeping actions.

All competitors run the same stages with the same drawn durations, so two rows of the table differ
only in the order of actions and in the runtime.
"""
