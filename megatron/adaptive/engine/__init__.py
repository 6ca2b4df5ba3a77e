"""Runs one step of a pipeline rank in the order that its policy picks.

Owns the executor, its adapter to megatron-core's forward and backward steps, deferred weight
gradients, and the agreement of a decision group. It also owns the parts that all training programs
share: progress, stopping, tracing. Models, checkpoints and the command line are in other packages.
"""
