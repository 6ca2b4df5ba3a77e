"""Starts jobs on many nodes, watches them, and changes their layout as nodes come and go.

Owns ``conf.sh``, rendezvous of nodes on pods, the scripts for Slurm, the manager of an elastic job
with its agents, snapshots kept on other nodes, and the status and report of a job. It starts
``torchrun`` and ``sbatch`` as they are and imports no torch.
"""
