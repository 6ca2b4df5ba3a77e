"""Saves a run's state completely or not at all, and loads it with any parallel sizes.

Contains the folders of checkpoints, the thread that writes during training, checkpoints on the
nodes' local disks, snapshots in memory, and the format of megatron-core's distributed checkpoints.
"""
