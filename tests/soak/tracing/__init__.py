"""Parts of ``tests/soak/diagnosis.py``."""
