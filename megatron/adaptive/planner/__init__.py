"""Plans how to train a model on the GPUs of a cluster.

The input is a model, a cluster and a profile with measured times. The planner finds the fastest or
cheapest plan. A plan sets the parallel sizes, the microbatch size, the schedule, the number of
layers per stage, and the nodes to use. The planner also predicts the time and the memory of a
training step. The planner needs neither torch nor a GPU.

``propose`` handles planning requests, ``search`` finds plans, ``cost`` predicts the step time of a
plan, and ``layer_costs`` computes the costs of layers. ``job_shape`` and ``choose_partition`` plan
for running jobs.
"""
