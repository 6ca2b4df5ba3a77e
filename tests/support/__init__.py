"""Provides code that tests, soak tests and studies share."""
