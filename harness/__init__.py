"""Provides code that benchmarks, studies, soak tests and the GPU check share.

The package contains tables of measurements with goals, and ranks that train a small GPT or sleep
instead of computing. It imports nothing from the programs that use it.
"""
