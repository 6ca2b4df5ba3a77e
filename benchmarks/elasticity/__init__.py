"""Parts of ``benchmarks/elastic.py``: nodes that fail at random, and what checkpoints cost."""
