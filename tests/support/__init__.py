"""Shared code of several tests, soak tests and studies."""
