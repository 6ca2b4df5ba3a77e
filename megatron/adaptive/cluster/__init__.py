"""Starts jobs on many nodes, watches them, and changes their layout as nodes come and go.

Contains the settings in ``conf.sh``, the processes of one node, the manager of an elastic job with
its agents, and the copies of the training state that nodes keep for each other. The package starts
an unmodified ``torchrun`` and does not import torch. Other code for jobs is in ``cli``: how pods
find each other, scripts for Slurm, and the status and report of a job.
"""
