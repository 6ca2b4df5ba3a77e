"""Contains the training loop and its hooks, the loggers, and the measurement of layers."""
