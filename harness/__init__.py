"""Provides code that is shared by benchmarks, studies, soak tests and the GPU check.

Contains tables of measurements with goals, and ranks that train a small GPT or sleep instead of
computing. This package imports nothing from the programs that use it.
"""
