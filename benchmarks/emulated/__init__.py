"""Runs pipeline schedules in real processes that sleep instead of computing.

All competitors run the same stages with the same random durations. Rows of the table therefore
differ only in the order of actions and in the runtime.
"""
