"""Reads traces written by other programs.

- ``published``  tables with one row per operation, in the format published with arXiv 2505.05713
- ``profiles``   JSON files of torch.profiler (one per rank), and spans of Megatron-LM
"""
