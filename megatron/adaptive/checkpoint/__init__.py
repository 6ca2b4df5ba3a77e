"""Saves a run whole or not at all, and loads it into any layout.

Owns the folders of checkpoints, the writer behind training, the nodes' own disks, snapshots in
memory, and the form of megatron-core's distributed checkpoints.
"""
