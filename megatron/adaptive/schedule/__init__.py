"""Orders the work of a pipeline: schedules known beforehand, policies that choose at run time.

Imports no torch. Import from the modules: this file re-exports nothing, so that a process loads
only the modules it uses.
"""
