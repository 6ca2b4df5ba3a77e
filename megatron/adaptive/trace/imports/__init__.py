"""Reads traces that other programs wrote.

- ``published``  tables of operations, a row each, as published with arXiv 2505.05713
- ``profiles``   the JSON of torch.profiler, a file per rank, and spans of Megatron-LM
"""
