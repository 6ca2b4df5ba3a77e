"""Reads traces written by other programs.

- ``published``  reads tables with one row per operation, in the format published with arXiv
                 2505.05713
- ``profiles``   reads JSON files of torch.profiler, one per rank, and spans of Megatron-LM
"""
