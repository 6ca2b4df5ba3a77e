"""Parts of ``tests/soak/elastic.py``: nodes that fail, what checkpoints cost, slow ranks."""
