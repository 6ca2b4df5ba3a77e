"""Channels that carry activations and gradients between pipeline ranks."""
