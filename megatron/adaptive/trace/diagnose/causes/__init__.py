"""Contains the causes that a diagnosis searches for: each module has a subclass of ``Cause``.

A module here is found by itself.
"""
