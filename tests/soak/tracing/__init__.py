"""Parts of ``tests.soak.diagnosis``."""
