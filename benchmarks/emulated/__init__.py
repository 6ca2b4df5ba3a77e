"""Pipeline schedules with emulated compute: real processes and messages, actions that sleep.

All competitors run the same stages with the same drawn durations, so that two rows of the table
differ only in the order of work and in the runtime.
"""
