"""The planner: the best way to use the GPUs one has.

Inputs are a model, a cluster and a profile; a plan is what comes out, and a prediction says what it
takes. Runs without torch.
"""
