"""Saves a run's state atomically, and loads it with any parallel sizes.

This package contains checkpoint folders, the background writer thread, checkpoints on the nodes'
local disks, in-memory snapshots, and the format of megatron-core's distributed checkpoints.
"""
