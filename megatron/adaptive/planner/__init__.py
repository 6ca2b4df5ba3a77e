"""Plans how to train a model on the GPUs of a cluster.

From a model, a cluster and a profile with measured durations, the planner finds the fastest or
cheapest plan: degrees of parallelism, microbatch, schedule, layers of each stage and nodes. It
predicts the seconds and the memory of a step. It needs neither torch nor a GPU.

``propose`` answers requests, ``search`` finds plans, ``cost`` predicts one plan, ``layer_costs``
computes its parts. ``job_shape`` and ``choose_partition`` plan for jobs that already run.
"""
