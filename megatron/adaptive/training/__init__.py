"""Contains the training loop with its hooks, its process, logging, and layer measurement."""
