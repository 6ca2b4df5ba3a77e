"""Starting runs on many nodes: the configuration file, pods, Slurm, and what to say of a run.

Owns ``conf.sh`` and the plan file, the commands that they turn into, how nodes find each other, the
scripts for Slurm and the folder of a job's logs. It starts ``torchrun`` and ``sbatch`` as they are
and imports no torch.
"""
