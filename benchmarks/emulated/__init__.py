"""Pipeline schedules with emulated compute: real processes and messages, actions that sleep.

Every competitor runs the same stages with the same drawn durations, so that what differs between
two rows of the table is the order of work and the runtime that keeps it.
"""
