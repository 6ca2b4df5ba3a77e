"""Implements the parts of ``tests.soak.diagnosis``."""
