"""Starts jobs on many nodes, watches them, and changes their layout when nodes join or leave.

This package contains the settings in ``conf.sh``, the processes of a node, the manager and agents
of an elastic job, and the copies of the training state that nodes store for each other. The package
starts an unmodified ``torchrun``, and does not import torch itself. Related code in ``cli`` lets
pods find each other, writes Slurm scripts, and shows the status of jobs.
"""
