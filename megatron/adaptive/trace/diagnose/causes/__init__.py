"""Contains the causes that a diagnosis searches for; each module has a subclass of ``Cause``.

A new module here needs no registration.
"""
