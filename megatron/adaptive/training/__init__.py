"""Contains the training loop, its hooks and process, logging, and measurements of layers."""
