"""Contains the training loop and its hooks, the loggers, and measurements of single layers."""
