"""Pipeline schedules with emulated compute: real processes and messages, actions that sleep.

All competitors run the same stages with the same drawn durations. Therefore two rows of the table
differ only in the order of actions and in the runtime.
"""
