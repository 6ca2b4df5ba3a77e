"""Runs the steps of a pipeline rank, in the order of actions that a policy chooses.

This package contains the executor, its adapter to megatron-core's forward and backward steps,
deferred weight gradients, and the agreement that makes ranks run the same actions. It also contains
what all training programs share: progress files, stopping and tracing. Models, checkpoints and the
command line are in other packages.
"""
