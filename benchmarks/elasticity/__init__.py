"""Parts of ``benchmarks/elastic.py``: nodes that fail, what checkpoints cost, slow ranks."""
