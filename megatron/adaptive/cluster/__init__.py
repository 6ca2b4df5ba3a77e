"""Starts jobs on many nodes, watches them, and changes their layout when nodes come and go.

Contains the settings in ``conf.sh``, the processes of a node, the manager and agents of an elastic
job, and the copies of the training state that nodes store for each other. This package starts an
unmodified ``torchrun``, and does not import torch. Related code is in ``cli``: how pods find each
other, Slurm scripts, and job status and reports.
"""
