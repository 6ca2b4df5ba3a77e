"""Transports activations and gradients between pipeline ranks."""
