"""Training loop with its hooks, the process around it, logging, and measurement of layers."""
