"""Contains the causes that a diagnosis searches for. Each module defines subclasses of ``Cause``.

New modules in this folder are found without registration.
"""
