"""Starts jobs on many nodes, watches them, and changes their layout as nodes come and go.

Owns ``conf.sh``, a node's part in a job, the manager of an elastic job with its agents, and
snapshots kept on other nodes. It starts ``torchrun`` as it is and imports no torch. Rendezvous of
pods, scripts for Slurm, status and report of a job are files of ``cli``.
"""
