"""Shared code of the programs that measure: benchmarks, studies, soak tests and the GPU check.

Contains tables with goals, and ranks that train a small GPT or sleep instead of computing. It
imports nothing from the programs that use it.
"""
