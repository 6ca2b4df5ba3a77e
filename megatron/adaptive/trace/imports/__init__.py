"""Reads traces that other programs wrote.

- ``published``  tables of operations, a row each, as published with arXiv 2505.05713
- ``kineto``     the JSON of torch.profiler, a file per rank
"""
