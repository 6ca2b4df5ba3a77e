"""Shared parts of the programs that measure: benchmarks, studies, soaks, and the check of a GPU.

Tables with goals, ranks of this machine, ranks that train a small GPT, ranks that sleep instead of
computing. Imports nothing of the programs that use it.
"""
