"""Runs the steps of a pipeline rank, in the order that its policy chooses.

This package contains the executor, its adapter to megatron-core's forward and backward steps,
deferred weight gradients, and the agreement by which ranks run the same actions. It also contains
what all training programs share: progress, stopping and tracing. Models, checkpoints and the
command line are in other packages.
"""
