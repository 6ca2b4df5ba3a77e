"""Starts jobs on many nodes, watches them, and changes their layout when nodes come and go.

This package contains the settings in ``conf.sh``, the processes of a node, the manager and agents
of an elastic job, and the copies of the training state that nodes store for each other. It starts
an unmodified ``torchrun``, and does not import torch. Related code in ``cli`` lets pods find each
other, writes Slurm scripts, and shows the status of jobs.
"""
